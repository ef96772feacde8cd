"""Parameters on their ranks, and keeping their copies in step."""
