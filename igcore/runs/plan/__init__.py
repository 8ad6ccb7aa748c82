"""The plan of a run before it starts: memory, devices and hours, estimated from its parameters.

`shapes` knows the sizes of models, `estimate` the formulas, `needs` applies them to the runs of
params files, and `report` prints tables. No weights are loaded.
"""
