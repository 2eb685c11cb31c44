"""Multi-head latent attention: its paged cache of latents, written and attended to."""
