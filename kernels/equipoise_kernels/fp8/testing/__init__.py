"""Shared by the kernels' tests and benchmarks; nothing that serves imports it."""
