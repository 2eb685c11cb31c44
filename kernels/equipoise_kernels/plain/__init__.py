"""Arithmetic of the plain data plane: torch in float32, on any device, optionally batch-invariant.

Imports neither Triton nor `equipoise_kernels.fp8`.
"""
