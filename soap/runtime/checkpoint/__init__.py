"""Checkpoints that any other plan can go on from."""
