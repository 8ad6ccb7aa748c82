"""Runs from parameters to records: what notebooks and the command line call."""
