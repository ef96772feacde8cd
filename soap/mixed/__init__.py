"""Virtual workers on machines that differ: pipelines side by side, with a bound on how far they may be apart (HetPipe)."""
