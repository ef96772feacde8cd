"""Slow and certain answers that tests and benchmarks hold the package against."""
