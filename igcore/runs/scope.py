"""What ``igcore verify`` can show and what it cannot, for its reports and for its help.

The command line reads this module, so it imports no model.
"""

TOLERANCE = 1e-6  # sums of float32 differ by this much between processors
UNCHECKED = (
    "that the policy gives these answers under these settings: token ids, block ends, abstentions "
    "and their reasons, `finished`, counts of work, traces, finals, fail_open_cost, and the hashes "
    "of files and code in params.json"
)
# of a policy in a server without batch invariance
SERVED = (
    "replay of a policy in a server is by statistics and not by bits, because its server does not "
    "promise the same tokens again, so nothing is decoded again"
)
UNCERTAIN = "seconds, the names of profile and run, files opened"  # no check can show these
