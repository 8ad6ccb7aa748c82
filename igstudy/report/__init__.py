"""Statistics and tables from the records of finished runs."""
