"""Every check that needs a GPU, by name: for whoever has one for a quarter of an hour."""
