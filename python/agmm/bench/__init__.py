"""Timing agmm beside the ways that it replaces. Extras: an op needs none of this."""
