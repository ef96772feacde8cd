"""A cluster on one Linux box: hosts as network namespaces with limited links and a CPU quota each. Needs root; no torch."""
