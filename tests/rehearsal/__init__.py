"""A rehearsal of the paper's systems without a download: tiny random checkpoints, data and a judge
in the exact formats.
"""
