"""Latents that travel between pools: held by the rank that read a prompt, pulled by another."""
