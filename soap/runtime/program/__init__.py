"""The program: what every rank does, in one order, worked out from a plan before the first step."""
