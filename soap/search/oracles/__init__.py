"""Exact searches of small spaces, lower bounds, and other searches. Tests and benchmarks compare the chain with them."""
