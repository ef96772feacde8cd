"""Ranks and what goes between them: launching, the world, redistribution, and telling the first cause of a failure."""
