"""The control plane's I/O: streams of workers, ticks, the store, status.

What to decide is `planning`'s business, what a message means is `wire`'s. Read `controller.py`
first: it is one pool's whole life, without sockets and without a clock.
"""
