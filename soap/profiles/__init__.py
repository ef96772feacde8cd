"""Costs of devices: data sheets with their sources, a roofline over them, and a store of measured computations, which is asked first."""
