"""From a strategy to its predicted time and memory: tiling, plan, timed tasks, simulation, timeline. No torch."""
