"""The scorers of the paper, and a cost that reads the last words alone."""
