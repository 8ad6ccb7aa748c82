"""A search that can be watched: its candidates, their tree as a picture, and an explorer."""
