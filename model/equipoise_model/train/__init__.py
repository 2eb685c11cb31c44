"""Trains the tiny checkpoint on text that every Python installation carries.

    python -m equipoise_model.train --out DIR

`data` needs no torch: the demo takes its prompts, held-out text, from there.
"""
