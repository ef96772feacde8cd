"""Recommender data made ready for training: categories indexed in order of first appearance, numbers converted, arrays written.

The steps are those of Criteo's public script (Naumov et al., "Deep Learning Recommendation Model", 2019), done by as many units (input
files) and chunks (pieces of them) at once as memory and cores allow while they run. Results are byte-identical whatever that number is.
Importing this package loads neither torch, numba nor pyarrow.
"""
