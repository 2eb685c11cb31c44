"""More clients than ranks can serve: each request ends well, or is refused before it begins."""

import asyncio
import json
import os
import statistics
import time
from collections import Counter
from urllib.parse import urlsplit

import pytest

from tests.support.serving_fleet import serving

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

MAX_TOKENS = 8
OVERLOAD_S = float(os.environ.get("EQUIPOISE_OVERLOAD_S", "120"))


class Crowd:
    """Clients that send request after request, and wait as long as a refusal says."""

    def __init__(self, address, *, num_clients, duration_s):
        self._host, self._port = urlsplit(address).hostname, urlsplit(address).port
        self._until_s = time.monotonic() + duration_s
        self.answered = [0] * num_clients
        """Answers by client, in the order of their first requests."""

        self.refusals = Counter()
        """Refusals by status and code."""

        self.faults = []
        """What else happened to a request, in words."""

        self.first_token_s = []

    async def run(self):
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.answered)):
                group.create_task(self._send_all(number))

    async def _send_all(self, number):
        turn = 0
        while time.monotonic() < self._until_s:
            turn += 1
            try:
                pause_s = await self._send(number, f"def f{number}_{turn}(")
            except (OSError, ValueError, LookupError, EOFError) as error:
                self.faults.append(f"client {number}, request {turn}: {error!r}")
                pause_s = 1
            await asyncio.sleep(min(pause_s, max(0, self._until_s - time.monotonic())))

    async def _send(self, number, prompt):
        """Send one; returns how long to wait before the next request, seconds."""
        body = json.dumps(
            {"prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
        )
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            status = int(head[0].split()[1])
            if status != 200:
                return self._refused(status, head, await reader.read())
            num_events = 0
            async for line in reader:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(f"after {num_events} events: {event}")
                    if not num_events:
                        self.first_token_s.append(time.monotonic() - began_s)
                    num_events += 1
                elif line == b"data: [DONE]\n":
                    self.answered[number] += 1
                    return 0
            raise EOFError(f"the stream ended after {num_events} events")
        finally:
            writer.close()

    def _refused(self, status, head, body):
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        self.refusals[status, json.loads(body)["error"]["code"]] += 1
        return int(headers["retry-after"])

    def quarters(self):
        """Answers of the clients that came first, and of those that came last."""
        size = len(self.answered) // 4
        return sum(self.answered[:size]), sum(self.answered[-size:])


async def served(folder, *, num_ranks, num_clients, duration_s, workers=(), gateway=()):
    """A crowd and what it met, on ranks that must not be taken for broken."""
    async with serving(folder, *workers, num_ranks=num_ranks, gateway=gateway) as running:
        before = running.feed.status
        crowd = Crowd(str(running.client.base_url), num_clients=num_clients, duration_s=duration_s)
        await crowd.run()
        metrics = (await running.client.get("/metrics")).text
        after = running.feed.status
    assert not crowd.faults, crowd.faults[:5]
    assert sum(crowd.answered), "no request was answered"
    assert "\nequipoise_gateway_replays_total 0.0\n" in metrics
    assert after.epoch == before.epoch, "no rank was taken for broken"
    return crowd


async def test_what_is_too_much_is_refused_and_breaks_nothing(tmp_path):
    crowd = await served(
        tmp_path,
        num_ranks=2,
        num_clients=60,
        duration_s=6,
        workers=("--max-requests=2", "--max-queued-requests=2"),
        gateway=("--max-queued-requests=4",),
    )
    assert crowd.refusals, "this is no overload"


@pytest.mark.benchmark
@pytest.mark.timeout(900)
async def test_a_thousand_streams_are_served_fairly(tmp_path):
    """Prints what clients met; `EQUIPOISE_OVERLOAD_S` changes the two minutes."""
    crowd = await served(tmp_path, num_ranks=4, num_clients=1000, duration_s=OVERLOAD_S)
    first, last = crowd.quarters()
    print(
        f"{sum(crowd.answered)} answers, {dict(crowd.refusals)} refused, 0 faults; first token "
        f"after {statistics.median(crowd.first_token_s):.1f} s (median), "
        f"{max(crowd.first_token_s):.1f} s at most; first and last quarter of clients: "
        f"{first} and {last} answers"
    )
    assert max(first, last) <= 2 * min(first, last)
