"""What communication and synchronization cost on a topology."""
