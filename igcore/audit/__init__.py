"""Ask a scorer of one's own whether it keeps the contract of a scorer."""
