"""Settings of the operating system for this process: memory, threads, clocks."""
