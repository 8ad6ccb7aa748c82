"""The benchmark: what decoding costs in this package and in others.

All are measured on one core, in one process, in turn. `models` holds the policy and the costs,
`others` what this package is compared with and `ours` its own variants; `measure` times, `plan`
lists the cases, `report` makes the tables. ``python -m benchmarks`` runs all of it.
"""
