"""Inspect a search: its recorded candidates, and their tree as a picture."""
