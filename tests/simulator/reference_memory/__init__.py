"""Memory over simulated time in plain Python, object by object: the oracle of ``soap.simulator.memory.sweep``."""
