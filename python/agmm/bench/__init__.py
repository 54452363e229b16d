"""The benchmarks, which time agmm beside the ways that it replaces. They are extras: no op needs
them."""
