"""Everything that decides about one pool: events in, effects out.

Pure: no I/O, clock, threads or logging. Read `controller.py` first. `balancer/` carries the effects
out.
"""
