"""Deciding what a pool's layout should be. Pure: data in, data with a reason out.

Nothing here does I/O, reads a clock, starts a thread, draws a random number, logs, or knows torch.
"""
