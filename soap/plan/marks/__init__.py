"""What fields of ``OpConfig`` add to a plan, a file for each field (``seam``)."""
