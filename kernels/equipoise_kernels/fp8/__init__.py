"""Operations of the FP8 data plane: Triton kernels for Hopper GPUs, each with a torch twin.

The twins run anywhere: tests compare the kernels with them, and a CPU uses them instead.
"""
