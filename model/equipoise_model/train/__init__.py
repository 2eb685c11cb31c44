"""Trains the tiny checkpoint on text that every Python installation carries.

    python -m equipoise_model.train --out DIR

It takes minutes on two cores. `checkpoints/tiny` holds what was shipped: its
`training.json` has the exact command, seed, losses and expert loads, its `loads.json` a trace of
those loads. `data` needs no torch: the demo takes its prompts, held-out text, from there.
"""
