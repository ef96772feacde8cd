"""Whatever times something: tiles, steps, updates and links between ranks, and this machine."""
