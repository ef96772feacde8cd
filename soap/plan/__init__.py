"""The one lowering: what a strategy means, tile by tile, without costs. The simulator times it, the runtime runs it. No torch."""
