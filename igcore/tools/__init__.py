"""What helps to set up a guard: the command ``igcore``, and the choice of a budget."""
