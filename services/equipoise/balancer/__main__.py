"""The balancer as a process: `run` builds the parts, serves, and shuts down gracefully."""

import asyncio
import gc
import importlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from opentelemetry.trace import Tracer

from equipoise.balancer.errors import BalancerError
from equipoise.balancer.leadership.lease import LeaseTiming
from equipoise.balancer.leadership.redis_register import RedisRegister
from equipoise.balancer.leadership.register import ALONE, LeaseRegister, RegisterError
from equipoise.balancer.planner.processes import PlannerProcesses
from equipoise.balancer.server import BalancerParts, serving
from equipoise.balancer.settings import BalancerSettings, LeaseKind
from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.sqlite_store import SqliteStore
from equipoise.balancer.store.store import Store, StoreError, StoreFault
from equipoise.daemon_thread import in_daemon_thread
from equipoise.planning.warm_up import warm_up
from equipoise.policy.book import PolicyBook
from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.logs import configure_logs, log_causes_once
from equipoise.telemetry.open_files import raise_open_files_limit
from equipoise.telemetry.tracing import tracing
from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.handshakes import logging_handshakes

_STORE_RETRY_S = 1.0
_PASSING = {StoreFault.UNREACHABLE, StoreFault.BROKEN, StoreFault.SLOW, StoreFault.FULL}
"""Faults of a store that may still be starting, or wait for its replicas."""

_MAX_TERM_OFFSET = 10_000
"""Terms end at 2^31 - 1, so this many failovers are 200,000 on average before the last."""

GC_THRESHOLDS = (50_000, 20, 20)
"""High: each of thousands of streams has some hundred long-lived objects, and a full collection
stops the event loop. Little garbage is in cycles."""

SWITCH_INTERVAL_S = 0.0005
"""How long another thread may keep the interpreter from the event loop, which needs it after each
poll of its sockets: a tenth of Python's default."""

_log = logging.getLogger("equipoise.balancer")


def run(settings: BalancerSettings) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status: 0, or 1 after one clear line."""
    with logging_handshakes(settings.tls):
        return _run(settings)


def _run(settings: BalancerSettings) -> int:
    configure_logs(settings.log_format, level=logging.getLevelName(settings.log_level.upper()))
    raise_open_files_limit()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with tracing(settings.tracing_endpoint, service="equipoise-balancer") as tracer:
            asyncio.run(_serve(settings, tracer))
    except (BalancerError, RegisterError, StoreError, TelemetryError, TrustError) as error:
        print(f"equipoise balancer: {error}", file=sys.stderr)  # noqa: T201 - for the user
        return 1
    return 0


async def _serve(settings: BalancerSettings, tracer: Tracer) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    log_causes_once(loop)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    credentials = Credentials(settings.tls)
    async with AsyncExitStack() as opened:
        store = _open_store(settings)
        opened.push_async_callback(_closed, store.close)
        register = await _open_register(settings)
        if register is not None:
            opened.push_async_callback(_closed, register.close)
        if settings.store_wait_s:
            await _until_reached(store, stop, wait_s=settings.store_wait_s)
        if stop.is_set():
            return
        if isinstance(register, RedisRegister):
            await _warn_of_failover(register)
        planner = await opened.enter_async_context(PlannerProcesses())
        parts = BalancerParts(
            store=store,
            listen=settings.listen,
            credentials=credentials,
            accepted_keys=settings.accepted_keys,
            advertise=settings.advertise,
            policies=PolicyBook(
                settings.defaults, needs_file=settings.policy is not None, now=time.time()
            ),
            policy_file=settings.policy,
            on_rejection=await _open_events(opened) if settings.policy is not None else None,
            warm_up=partial(_warm_up, planner),
            planner=planner,
            drain_timeout_s=settings.drain_timeout_s,
            metrics=settings.metrics,
            probes_listen=settings.probes_listen,
            web_listen=settings.web_listen,
            register=register,
            term_offset=1 + secrets.randbelow(_MAX_TERM_OFFSET),
            tracer=tracer,
            timing=_timing(settings) if settings.is_shared else ALONE,
        )
        async with serving(parts):
            await stop.wait()
            _log.info("stopping; workers keep serving without a balancer")


async def _warm_up(planner: PlannerProcesses) -> None:
    """Compile the planner in its process and in this one, on a thread: it takes a while."""
    both = planner.start(), in_daemon_thread(warm_up, name="compiler")
    for ended in await asyncio.gather(*both, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


def _open_store(settings: BalancerSettings) -> Store:
    if not settings.is_shared:
        return SqliteStore(Path(settings.store))
    return RedisStore(settings.store, password_file=settings.store_password_file)


async def _until_reached(store: Store, stop: asyncio.Event, *, wait_s: float) -> None:
    """Retry until the store answers, or `stop` is set.

    Raises:
        StoreError: it cannot be reached within `wait_s`, or rejects the balancer.
    """
    until_s = time.monotonic() + wait_s
    while not stop.is_set():
        try:
            await store.highest_term()
        except StoreError as error:
            if error.fault not in _PASSING or time.monotonic() >= until_s:
                raise
            _log.warning("waiting for the store: %s", error)
        else:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_STORE_RETRY_S):
                await stop.wait()


async def _warn_of_failover(register: RedisRegister) -> None:
    """Log if a failover of Redis can leave two leaders."""
    try:
        risk = await register.failover_risk()
    except RegisterError as error:
        risk = f"cannot tell whether a failover of Redis can leave two leaders: {error}"
    if risk:
        _log.warning("%s", risk)


async def _open_register(settings: BalancerSettings) -> LeaseRegister | None:
    """Where balancers elect a leader; None for a single balancer with a file."""
    if not settings.is_shared:
        return None
    timeout_s = _timing(settings).request_timeout_s
    if settings.lease is LeaseKind.STORE:
        return RedisRegister(
            settings.store, timeout_s=timeout_s, password_file=settings.store_password_file
        )
    try:
        kubernetes = importlib.import_module("equipoise.balancer.leadership.kubernetes_register")
    except ModuleNotFoundError as error:
        raise BalancerError(
            f"a Kubernetes lease needs equipoise[kubernetes] (there is no {error.name}): run pip "
            "install '.[kubernetes]' in a checkout"
        ) from error
    register: LeaseRegister = await kubernetes.KubernetesRegister.connect(
        settings.lease_name, timeout_s=timeout_s
    )
    return register


async def _open_events(
    opened: AsyncExitStack,
) -> Callable[[str], Awaitable[None]] | None:
    """What is called with the reason of rejected policies: Kubernetes events, in a cluster."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        cluster = importlib.import_module("equipoise.balancer.leadership.cluster")
        events = importlib.import_module("equipoise.balancer.telemetry.kubernetes_events")
        api, namespace = await cluster.connect()
    except (ModuleNotFoundError, RegisterError) as error:
        _log.warning("no Kubernetes events for rejected policies: %s", error)
        return None
    recorder = events.KubernetesEvents(api, namespace=namespace)
    opened.push_async_callback(_closed, recorder.close)
    return partial(recorder.warn, "PolicyRejected")


def _timing(settings: BalancerSettings) -> LeaseTiming:
    return LeaseTiming.lasting(settings.lease_duration_s)


async def _closed(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(StoreError, RegisterError):
        await close()


if __name__ == "__main__":
    sys.exit(run(BalancerSettings()))
