"""Virtual workers that train: ranks compute their stages, and servers beside them hold the global values."""
