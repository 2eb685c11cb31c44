"""Latents that travel between pools: held by a prefill rank, fetched by a decode rank."""
