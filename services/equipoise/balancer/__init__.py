"""The control plane's I/O: streams of workers, ticks, the store, status.

What to decide is `planning`'s business, what a message means is `wire`'s. Read
`pool/controller.py` first: it is one pool's whole life, without sockets and without a clock; its
hands are `pool/runner.py`. What a balancer answers with, leading or following, is `seat.py`; what
it listens at, `server.py`. Its packages import downwards only: telemetry, web, service, pool,
leadership, then policy and store.
"""
