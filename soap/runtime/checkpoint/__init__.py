"""Checkpoints that training by any other plan can resume from."""
