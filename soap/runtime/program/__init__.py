"""What every rank does, in one order, worked out from a plan before any step."""
