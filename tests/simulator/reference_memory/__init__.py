"""Memory over simulated time in plain Python, object by object, obviously right: the oracle of the sweep (``soap.simulator.memory.sweep``)."""
