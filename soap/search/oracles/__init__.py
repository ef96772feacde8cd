"""Exact searches of small spaces, lower bounds, and other searches: what tests and benchmarks hold the chain against."""
