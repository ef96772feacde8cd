"""What a schedule means: who holds the iteration up, slack, pictures, and comparisons with measured ones."""
