"""The FP8 data plane: the model on the kernels of `equipoise_kernels.fp8`. Serving on Hopper GPUs.

Computes the same function as `equipoise_model.plain`, within FP8 precision, from the same
checkpoints and placements; each file here has its counterpart there. Activations are bfloat16
between layers and are quantised before every linear map. A step does not wait for the device, so
that it can be captured as a CUDA graph, unless ranks exchange rows through torch.distributed.
"""
