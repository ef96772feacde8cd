"""The compiled simulator: lowering and event loop over arrays of integers, with no Python object per task (numba).

``graph_arrays`` describes a graph and a cluster, ``variants`` an operator's tiles; both are made in Python and numpy. ``holdings``,
``fetches``, ``carriers`` and ``operator_lowering`` lower one operator's outputs. ``synchronization`` lowers the synchronization of
parameters (``syncs``: a file for each method). ``events`` plays the tasks. ``engine``, one level up, is what Python uses.
"""
