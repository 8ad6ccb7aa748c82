"""Policies, reward and cost models, guards and prompt sets by name, with their pinned files.

`policies`, `registry` and `prompts` hold the tables of names. `pretrained`, `hub` and `assets` get
files; `lm_scorer` is the base of all scorers that are language models.
"""
