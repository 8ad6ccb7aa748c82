"""Models in a server: the policy, its engine, and a scorer behind an endpoint."""
