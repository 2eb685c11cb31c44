"""`ROUTE`: from the address by which a balancer is known to the one that reaches it."""

from collections.abc import Callable
from contextvars import ContextVar


class NoRouteError(RuntimeError):
    """Nothing reaches a balancer; the message includes the remedy."""


ROUTE: ContextVar[Callable[[str], str]] = ContextVar("route", default=lambda address: address)
"""Turns host:port of a balancer into host:port to dial; may raise `NoRouteError`.

Balancers are dialled directly, except by `kubectl equipoise`, which sets a route through kubectl.
"""
