"""One training step of one rank: forward, backward, and what follows."""
