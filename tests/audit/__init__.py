"""``make audit``: hostile scorers against the search.

`zoo` has the scorers, `emissions` decodes with them and judges all that is shown again, `__main__`
is the command.
"""
