"""What each method of synchronizing parameters adds to a plan: one module per method, with the method's name in ``sync_contracts``."""
