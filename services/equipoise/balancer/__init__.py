"""The control plane's I/O: streams of workers, ticks, the store, status.

What to decide is `planning`'s business, what a message means is `wire`'s. What to
decide about a pool is `equipoise.pool`'s business; `runner.py` carries it out. `seat.py` holds what
a balancer answers with, leading or following; `server.py` what it listens on.
"""
