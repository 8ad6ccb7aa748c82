"""The benchmark: what decoding costs in this package and in plain transformers.

All are measured on one machine, in one process, interleaved. `models` holds the policy and the
scorers, `baselines` what this package is compared with and `ours` this package's variants;
`measure` counts and times, `plan` lists the settings, `report` makes the table and the figure.
``python -m benchmarks`` runs all of it.
"""
