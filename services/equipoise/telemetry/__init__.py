"""Metrics, health probes, JSON logs and traces of a process.

Knows no package above it; callers pass in what there is to show.
"""
