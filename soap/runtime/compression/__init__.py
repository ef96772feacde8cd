"""The arithmetic of compressed gradients: what is selected, sent, kept and added up. No processes and no wires."""
