"""The compiled simulator: lowering and event loop over arrays of integers, with no Python object per task (numba).

``graph_arrays`` holds what a graph and a cluster are, ``variants`` what an operator's tiles are; both are made in Python and numpy.
``holdings``, ``fetches``, ``carriers`` and ``operator_lowering`` lower one operator's outputs, ``synchronization`` keeps parameters in step
(``syncs``, a file for each method), ``events`` plays the tasks.
``engine`` (one level up) is the way in.
"""
