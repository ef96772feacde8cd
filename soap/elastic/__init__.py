"""Training with workers that hold no state: sparse layers are computed at servers that own them, batches are dealt in leases, and Ray
starts what is lost anew."""
