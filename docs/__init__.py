"""The pages of this project, and the command that writes their tables."""
