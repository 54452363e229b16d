"""Ranks, operands and references for tests, benchmarks and examples."""
