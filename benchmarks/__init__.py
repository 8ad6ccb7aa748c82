"""The benchmark: what decoding costs here, with naive rivals and living ones, on one machine, in
one process, interleaved.

`models` holds what is decoded from, `rivals` and `ours` what is compared, `measure` counts and
times, `plan` says which settings are run, `report` makes the table, the notes and the picture.
``python -m benchmarks`` runs all of it.
"""
