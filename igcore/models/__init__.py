"""Policies, reward and cost models, guards and prompt sets by name, with their pinned files."""
