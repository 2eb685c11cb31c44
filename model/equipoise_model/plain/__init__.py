"""The plain data plane: the model by torch, on any device. Training, CPUs, batch-invariant serving.

Imports nothing from `equipoise_model.fp8`.
"""
