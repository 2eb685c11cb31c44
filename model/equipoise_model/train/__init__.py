"""Trains the tiny checkpoint on text that every Python installation has.

    python -m equipoise_model.train --out DIR

It takes minutes on two cores. `checkpoints/tiny` holds the shipped result: `training.json` has the
exact command, seed, losses and expert loads, `loads.json` a trace of those loads. `data` does not
need torch: the demo takes held-out text from it as prompts.
"""
