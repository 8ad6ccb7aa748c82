"""The critic: latents, network, rollouts and training."""
