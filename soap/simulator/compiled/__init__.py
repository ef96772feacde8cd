"""The compiled simulator: lowering and event loop over arrays of integers, with no Python object per task (numba).

``tables`` holds what a graph and a cluster are, ``variants`` what an operator's tiles are; both are made in Python and numpy. ``holdings``,
``fetches``, ``carriers`` and ``fragment`` lower one operator's outputs, ``synchronization`` the sums of gradients and the updates,
``serving`` the parameter servers (both ask ``keepers`` who keeps what), ``events`` plays the tasks.
``engine`` (one level up) is the way in.
"""
