"""Strategies as data: configurations of operators and parameters, the classical ones, and strategy files. No torch."""
