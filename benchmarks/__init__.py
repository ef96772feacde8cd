"""One script per claim; ``docs/benchmarks.md`` holds dated results."""
