"""Plans as configurations of other trainers: the nearest one that each can be told, and what it means here."""
