"""Benchmark of the kernels on a GPU, with rules against misleading results.

Denominators are measured in the same run, alternating with what they divide. Inputs are random with
different scales, weights rotate through more memory than the L2 cache holds, and the cache is
flushed. Times are medians of CUDA graph replays. Outputs are poisoned before and checked after the
timed run. Nothing is tuned, and the name of each kernel that ran is recorded.
"""
