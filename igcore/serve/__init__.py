"""Models in a server: the policy, its engine and hidden states, and a scorer behind an endpoint."""
