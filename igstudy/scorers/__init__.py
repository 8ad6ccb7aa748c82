"""The scorers of the paper, and a held-out judge."""
