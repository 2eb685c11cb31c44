"""The model in FP8 on the kernel suite: serving on a GPU.

The same function as `equipoise_model.transformer`, within FP8's precision, from the same
checkpoints and over the same placements: one file here for one there. Rows are bfloat16 between
layers; every linear map gets them as FP8 codes with scales. A step never waits for
the device, unless ranks exchange rows by a library of the host, so that it can be captured as a
CUDA graph. Knows the kernels, never which backend runs
them.
"""
