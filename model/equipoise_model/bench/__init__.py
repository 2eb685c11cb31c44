"""Timings of the model on a GPU; `make bench-gpu` runs them behind the kernels' own."""
