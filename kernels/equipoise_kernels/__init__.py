"""The model's arithmetic: `plain` (torch, any device) and `fp8` (Triton kernels for Hopper GPUs).

Shared by both: errors, FP8 formats, the choice of replicas, and a measure of difference.
"""
