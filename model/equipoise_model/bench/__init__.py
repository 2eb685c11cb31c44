"""Timings of the model on a GPU; `make bench-gpu` runs them after the kernels' own."""
