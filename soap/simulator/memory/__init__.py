"""What devices hold: bounds for any order of tasks, and over the simulated time."""
