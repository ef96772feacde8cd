"""Optimizers: recipes, state, schedules and clipping, whatever way a plan cuts parameters."""
