"""``make audit``: hostile scorers against the search, and broken code against the tests.

`zoo` has the scorers, `emissions` decodes with them and judges all that is shown again, `breakages`
breaks single lines of the package, `__main__` is the command.
"""
