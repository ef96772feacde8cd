"""Optimizers: recipes, states, schedules and clipping, apart from how a plan cuts parameters."""
