"""Synchronization of parameters in compiled code: a file for each method that has tasks of its own, and what they share."""
