"""What is done to release a version (docs/releasing.md)."""
