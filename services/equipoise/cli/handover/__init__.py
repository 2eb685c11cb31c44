"""`equipoise handover`: verify that latents of a prompt travel between two pools."""
