"""Multi-head latent attention: writing its paged cache of latents, and attending to it."""
