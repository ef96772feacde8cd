"""Training with servers and workers, simulated: how many samples it takes a second once it goes evenly, and what waits for what."""
