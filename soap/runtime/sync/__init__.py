"""Parameters on a rank, and the methods that keep their copies in step: one file a method."""
