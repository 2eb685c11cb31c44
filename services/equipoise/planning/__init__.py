"""Decides what a pool's layout should be. Pure: data in, data with a reason out.

Nothing here does I/O, reads a clock, starts threads, draws random numbers, logs, or imports torch.
"""
