"""The critic: latents and network; `igstudy.training` trains it."""
