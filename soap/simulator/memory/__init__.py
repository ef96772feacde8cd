"""How much memory devices hold: an upper bound for any order of the tasks, and the use over simulated time."""
