"""``make slurm-test``: a walk on a SLURM cluster of one node, which is there for that time only.

`node` makes and removes the cluster, `walks` says what walks on it, `__main__` is the command. It
needs root on Debian, and is no part of the tests.
"""
