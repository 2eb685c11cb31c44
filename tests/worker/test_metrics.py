"""A worker exports the metrics that docs/metrics.md lists."""

import asyncio
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from equipoise.planning.phase import Phase
from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.wire.messages import Wait
from equipoise.worker.blocks import BlockPool
from equipoise.worker.lifecycle import serve
from equipoise.worker.metrics import WorkerCollector
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.timings import Timings
from tests.support.authority import Authority
from tests.support.scrapes import documented, free_address, ours, scrape, value_of
from tests.support.worker_parts import parts_of

WAIT_S = 120.0


def collector(rank=None, **changes):
    blocks = BlockPool(num_blocks=4, block_tokens=16)
    scheduler = Scheduler(blocks=blocks, max_requests=4, max_queued=8, max_step_tokens=8)
    settings = WorkerSettings(drain_timeout_s=0.0, **changes)
    parts = parts_of(settings, scheduler=scheduler, timings=Timings(num_corrupted=2))
    parts.waits.note(Wait.OUTAGE, "ended the requests")
    parts.waits.note(Wait.DRAIN, "there is no such wait")
    return WorkerCollector(rank=lambda: rank, parts=parts), scheduler


async def test_a_worker_exports_exactly_the_documented_metrics():
    metrics, _ = collector()
    async with metrics_at(MetricsPort(metrics_listen="127.0.0.1:0"), metrics) as address:
        families = await scrape(address)
    assert ours(families) == documented("Worker") | documented("Every process")
    assert value_of(families, "equipoise_worker_serving") == 0
    assert value_of(families, "equipoise_worker_rank") == -1
    assert value_of(families, "equipoise_worker_checksum_failures_total") == 2
    counts = {"step": 0, "pull": 0, "read": 0, "ack": 0, "outage": 1, "latents": 0}
    for name, reached in counts.items():
        assert value_of(families, "equipoise_worker_timeouts_total", wait=name) == reached
    (family,) = (one for one in families.values() if one.name == "equipoise_worker_timeouts")
    assert {sample.labels["wait"] for sample in family.samples} == set(counts)


def test_the_phase_is_a_label_of_its_own_metric():
    metrics, _ = collector(phase=Phase.DECODE)
    families = {family.name: family for family in metrics.collect()}
    (sample,) = families["equipoise_worker_phase"].samples
    assert (sample.labels, sample.value) == ({"phase": "decode"}, 1)


def test_cache_usage_is_a_fraction_of_all_blocks():
    metrics, scheduler = collector()
    scheduler.submit(Request(key=1, prompt=(1, 2), max_tokens=3))
    scheduler.plan()
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert value_of(families, "equipoise_worker_cache_used_ratio") == 0.25
    assert value_of(families, "equipoise_worker_active_requests") == 1


async def test_no_address_means_no_port():
    metrics, _ = collector()
    async with metrics_at(MetricsPort(), metrics) as address:
        assert address == ""


async def test_a_worker_serves_its_metrics_over_tls_before_it_has_a_rank(tmp_path):
    authority, address, stop = Authority(tmp_path), free_address(), asyncio.Event()
    settings = WorkerSettings(
        balancer="127.0.0.1:1",
        metrics=MetricsPort(metrics_listen=address, metrics_tls=True),
        tls=authority.issue("worker"),
    )
    async with asyncio.timeout(WAIT_S):
        worker = asyncio.create_task(serve(settings, stop=stop))
        try:
            while True:
                with suppress(OSError):
                    families = await scrape(address, ca_file=authority.ca_file)
                    break
                await asyncio.sleep(0.05)
        finally:
            stop.set()
            await worker
    assert value_of(families, "equipoise_worker_serving") == 0
