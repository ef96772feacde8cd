"""What the process asks of its operating system: memory, threads, clocks."""
