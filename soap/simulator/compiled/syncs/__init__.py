"""How compiled code synchronizes parameters: a file for each method that has tasks of its own, and what they share."""
