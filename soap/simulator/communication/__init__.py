"""What communication and synchronization take on a topology."""
