"""`BenchClients`: sends a benchmark's requests and records when each piece of text arrives.

`report` computes the figures.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from equipoise.cli import openai_client
from equipoise.cli.bench.requests import TimedRequest
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.settings.errors import InvalidSettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The result of one request; times are seconds on the clients' clock."""

    request: TimedRequest
    """The request."""

    began_s: float
    """When it was sent."""

    ended_s: float
    """When it ended."""

    chunks_s: tuple[float, ...]
    """When each piece of text arrived."""

    num_prompt_tokens: int
    """The server's count; 0 if it sends none."""

    num_tokens: int
    """The server's count, or else the number of pieces."""

    text: str
    """The whole output."""

    failure: str
    """Why the request failed; empty if it did not."""


class BenchClients:
    """The clients of one benchmark.

    `clock` returns monotonic seconds; `done` is called with each result.
    """

    def __init__(
        self,
        settings: BenchServeSettings,
        *,
        clock: Callable[[], float],
        done: Callable[[RequestResult], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._done = done
        self._client = httpx2.AsyncClient(
            base_url=openai_client.base_url(settings.url),
            headers=openai_client.headers(settings.api_key),
            timeout=settings.timeout_s,
            limits=httpx2.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The model to request.

        Raises:
            InvalidSettingsError: the server is unreachable or lists no model.
        """
        if self._settings.model:
            return self._settings.model
        try:
            answer = await self._client.get("models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise openai_client.unreachable(self._settings.url, error) from None
        openai_client.check(answer.status_code, answer.content)
        return openai_client.first_model(answer.content)

    async def run(self, requests: Sequence[TimedRequest], *, model: str) -> list[RequestResult]:
        """Send each request at its arrival time; return the results in the same order.

        A request waits while `concurrency` others are in flight.
        """
        slots = asyncio.Semaphore(self._settings.concurrency)
        start_s = self._clock()
        tasks: list[asyncio.Task[RequestResult]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await asyncio.sleep(max(0.0, start_s + request.begins_s - self._clock()))
                await slots.acquire()
                task = group.create_task(self._send(request, model=model))
                task.add_done_callback(lambda _: slots.release())
                tasks.append(task)
        return [task.result() for task in tasks]

    async def _send(self, request: TimedRequest, *, model: str) -> RequestResult:
        began_s, failure, stream = self._clock(), "", _TextStream()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._read(request, stream, model=model)
        except TimeoutError:
            failure = f"not complete within {self._settings.timeout_s:g} s"
        except InvalidSettingsError as error:
            failure = str(error)
        except httpx2.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        if not failure and not stream.finished:
            failure = "the stream ended without a finish reason"
        result = RequestResult(
            request=request,
            began_s=began_s,
            ended_s=self._clock(),
            chunks_s=tuple(stream.chunks_s),
            num_prompt_tokens=stream.usage.get("prompt_tokens", 0),
            num_tokens=stream.usage.get("completion_tokens", len(stream.chunks_s)),
            text="".join(stream.texts),
            failure=failure,
        )
        self._done(result)
        return result

    async def _read(self, request: TimedRequest, stream: "_TextStream", *, model: str) -> None:
        body = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": self._settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._settings.ignore_eos else {}),
        }
        async with self._client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                openai_client.check(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if event := openai_client.event(line):
                    stream.take(event, now_s=self._clock())


class _TextStream:
    """What a stream has sent so far."""

    def __init__(self) -> None:
        self.chunks_s: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, int] = {}
        self.finished = False

    def take(self, event: dict[str, Any], *, now_s: float) -> None:
        """Add an event."""
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if choice["text"]:
                self.chunks_s.append(now_s)
                self.texts.append(choice["text"])
            self.finished = self.finished or choice["finish_reason"] is not None
