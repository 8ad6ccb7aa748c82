"""Try to break the guarantee: hostile scorers against the search, broken code against the tests."""
