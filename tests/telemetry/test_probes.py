"""Probes without a certificate."""

import asyncio

import httpx2

from equipoise.telemetry.probes import probes_at


async def test_probes_at_a_port_of_their_own_answer_with_a_single_word():
    ready = False
    async with (
        asyncio.timeout(120),
        probes_at("127.0.0.1:0", ready=lambda: ready) as address,
        httpx2.AsyncClient(base_url=f"http://{address}") as client,
    ):
        live, not_ready = await client.get("/livez"), await client.get("/readyz")
        ready = True
        is_ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert (live.status_code, live.text) == (200, "ok\n")
    assert (not_ready.status_code, not_ready.text) == (503, "not ready\n")
    assert (is_ready.status_code, is_ready.text) == (200, "ok\n")
    assert metrics.status_code == 404
