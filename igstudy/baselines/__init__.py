"""The baselines that need more than options of the block search.

ARGS and RE-Control are of the paper, rejection sampling is not.
"""
