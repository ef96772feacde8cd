"""Lower bounds of plans that are not simulated."""
