"""How much memory devices hold over simulated time, and hosts."""
