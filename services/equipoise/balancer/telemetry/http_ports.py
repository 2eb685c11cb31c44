"""The HTTP ports of the balancer: probes, and metrics and the web page, at one port or two."""

from contextlib import AsyncExitStack

from equipoise.balancer.clock import Clock
from equipoise.balancer.readiness import Readiness
from equipoise.balancer.seat import Seat
from equipoise.balancer.store.store import Store
from equipoise.balancer.telemetry.metrics import BalancerCollector
from equipoise.balancer.web.server import serving_page
from equipoise.balancer.web.state import PageState
from equipoise.telemetry.exposition import metrics_route, registry_of, serving_http
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.telemetry.probes import probes_at
from equipoise.trust.credentials import Credentials
from equipoise.trust.https import metrics_https
from equipoise.trust.metrics import CertificateCollector


async def open_http(
    running: AsyncExitStack,
    seat: Seat,
    *,
    store: Store,
    clock: Clock,
    readiness: Readiness,
    credentials: Credentials,
    metrics: MetricsPort,
    probes_listen: str,
    web_listen: str,
) -> str:
    """Serve until `running` exits; returns the host:port of metrics, empty if off.

    Raises:
        TelemetryError: an address is not available, or the token file cannot be used.
        TrustError: the certificate cannot be used.
    """
    await running.enter_async_context(probes_at(probes_listen, ready=lambda: not readiness.missing))
    registry = registry_of(BalancerCollector(seat, clock=clock), CertificateCollector(credentials))
    routes = (metrics_route(registry, token_file=metrics.metrics_token_file),)
    is_one = metrics.metrics_listen == web_listen
    metrics_at = ""
    if metrics.metrics_listen and not is_one:
        tls = metrics_https(credentials, metrics)
        metrics_at = await running.enter_async_context(
            serving_http(routes, listen=metrics.metrics_listen, tls=tls)
        )
    if web_listen:
        page = serving_page(
            PageState(seat, store=store, clock=clock),
            listen=web_listen,
            routes=routes if is_one else (),
        )
        web_at = await running.enter_async_context(page)
        metrics_at = web_at if is_one else metrics_at
    return metrics_at
