"""Policies, reward and cost models, guards and prompt sets by name, with their pinned files.

`policies`, `registry` and `prompts` load things by name. `pretrained`, `hub` and `assets` read,
download and check files; `lm_scorer` has the base class of scorers that are language models.
"""
