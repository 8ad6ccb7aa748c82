"""Inspect a search: its recorded candidates, their tree as a picture, and an explorer."""
