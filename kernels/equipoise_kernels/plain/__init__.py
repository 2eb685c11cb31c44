"""Arithmetic of the plain data plane: torch in float32, on any device.

Most functions also have a batch-invariant form. Imports neither Triton nor `equipoise_kernels.fp8`.
"""
