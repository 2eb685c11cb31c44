"""Warning events of the pod, with an API server that may reject them or hang."""

import pytest
from aiohttp import web
from kubernetes.aio import client

from equipoise.balancer.telemetry import kubernetes_events as events_module
from equipoise.balancer.telemetry.kubernetes_events import KubernetesEvents


class EventServer:
    def __init__(self):
        self.made = []
        self.status = 201

    async def make(self, request):
        self.made.append(await request.json())
        return web.json_response(self.made[-1], status=self.status)


@pytest.fixture
async def server():
    made = EventServer()
    app = web.Application()
    app.router.add_post("/api/v1/namespaces/moe/events", made.make)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def events(server, monkeypatch):
    monkeypatch.setenv("POD_NAME", "balancer-0")
    opened = KubernetesEvents(
        client.ApiClient(client.Configuration(host=server.address)), namespace="moe"
    )
    yield opened
    await opened.close()


async def test_a_rejection_is_an_event_of_the_pod(server, events):
    await events.warn("PolicyRejected", "line 3: " + "x" * 5000)
    (event,) = server.made
    assert (event["type"], event["reason"]) == ("Warning", "PolicyRejected")
    assert event["involvedObject"]["name"] == "balancer-0"
    assert event["message"].startswith("line 3: ")
    assert len(event["message"]) == 1024


@pytest.mark.parametrize("status", [403, 500])
async def test_a_cluster_that_rejects_is_logged_and_no_more(server, events, status, caplog):
    server.status = status
    await events.warn("PolicyRejected", "x")
    assert "no Kubernetes event" in caplog.text


async def test_a_cluster_that_is_gone_is_logged_and_no_more(events, server, caplog, monkeypatch):
    monkeypatch.setattr(events_module, "_TIMEOUT_S", 0.5)
    events._api.configuration.host = "http://127.0.0.1:9"
    await events.warn("PolicyRejected", "x")
    assert "no Kubernetes event" in caplog.text
