"""How networks are trained on rollouts: the critic, and the value network of RE-Control."""
