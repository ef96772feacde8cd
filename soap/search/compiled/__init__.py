"""The Metropolis-Hastings chain in one compiled loop, on top of the compiled simulator."""
