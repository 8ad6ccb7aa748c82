"""The baselines of the paper that need more than options of the block search: ARGS, RE-Control."""
