"""Figures from the records of finished runs."""
