"""Ranks and their communication: launching, the world, redistribution, and reporting the first cause of a failure."""
