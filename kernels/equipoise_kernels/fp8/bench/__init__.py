"""Benchmark of the kernels on a GPU, by rules that make it hard to fool oneself.

Denominators are measured in the same run, alternating with what they divide. Inputs are random with
scales that differ, weights rotate through more memory than the L2 cache holds and the cache is
flushed. Times are medians of CUDA graph replays. Outputs are poisoned before and checked after the
timed run. Nothing is tuned, and each kernel that ran is recorded by its name.
"""
