"""Fixtures: a pool's controller with scripted workers."""

from tests.support.pool_harness import (  # noqa: F401 - fixtures
    harness,
    hello_of,
    make_harness,
    policy,
    serving_harness,
    skewed,
    worker_of,
)
