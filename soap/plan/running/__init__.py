"""In which order ranks run a plan's passes: tiles forward, and backward by segments, each of which runs as a whole. No torch."""
