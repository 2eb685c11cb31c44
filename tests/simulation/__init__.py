"""Deterministic simulation of a whole fleet in one process: one seed is one schedule."""
