"""Baselines of the paper that are no block search: ARGS and RE-Control."""
