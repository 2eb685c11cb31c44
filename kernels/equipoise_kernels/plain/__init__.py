"""Arithmetic of the plain data plane: torch, on any device, in the dtype of its inputs.

Most functions also have a batch-invariant form. Imports neither Triton nor `equipoise_kernels.fp8`.
"""
