"""One training step of one rank: forward pass, backward pass, update."""
