"""`Load`: clients that give a server its requests, and the times at which words come back.

Owns the measuring, not the judging (`bench_report` does that). Knows OpenAI's form and no server.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from equipoise.cli import openai_client as openai_server
from equipoise.cli.bench.requests import AskedRequest
from equipoise.cli.bench.settings import BenchServeSettings
from equipoise.cli.offline.settings import ToolInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of one request; times are seconds on the load's clock.

    `words_s` are the times at which pieces of the text came. `num_tokens` is the server's own
    count where it tells one, else the number of pieces. `failure` says why it failed, or is empty.
    """

    asked: AskedRequest
    began_s: float
    ended_s: float
    words_s: tuple[float, ...]
    num_prompt_tokens: int
    num_tokens: int
    text: str
    failure: str


class Load:
    """One benchmark's clients. `clock` gives monotonic seconds, `done` is told each end."""

    def __init__(
        self,
        settings: BenchServeSettings,
        *,
        clock: Callable[[], float],
        done: Callable[[Served], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._done = done
        self._client = httpx2.AsyncClient(
            base_url=openai_server.base_url(settings.url),
            headers=openai_server.headers(settings.api_key),
            timeout=settings.timeout_s,
            limits=httpx2.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The model that is asked.

        Raises:
            ToolInputError: the server cannot be reached, or lists none.
        """
        if self._settings.model:
            return self._settings.model
        try:
            answer = await self._client.get("models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise openai_server.unreachable(self._settings.url, error) from None
        openai_server.check(answer.status_code, answer.content)
        return openai_server.first_model(answer.content)

    async def run(self, requests: Sequence[AskedRequest], *, model: str) -> list[Served]:
        """Give the server these requests, each at its time; in the order in which they were asked.

        A request whose time has come begins when fewer than `concurrency` are open.
        """
        places = asyncio.Semaphore(self._settings.concurrency)
        start_s = self._clock()
        tasks: list[asyncio.Task[Served]] = []
        async with asyncio.TaskGroup() as group:
            for asked in requests:
                await asyncio.sleep(max(0.0, start_s + asked.begins_s - self._clock()))
                await places.acquire()
                task = group.create_task(self._serve(asked, model=model))
                task.add_done_callback(lambda _: places.release())
                tasks.append(task)
        return [task.result() for task in tasks]

    async def _serve(self, asked: AskedRequest, *, model: str) -> Served:
        began_s, failure, heard = self._clock(), "", _Heard()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._hear(asked, heard, model=model)
        except TimeoutError:
            failure = f"it was not answered within {self._settings.timeout_s:g} s"
        except ToolInputError as error:
            failure = str(error)
        except httpx2.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        if not failure and not heard.finished:
            failure = "the stream has no end"
        served = Served(
            asked=asked,
            began_s=began_s,
            ended_s=self._clock(),
            words_s=tuple(heard.words_s),
            num_prompt_tokens=heard.usage.get("prompt_tokens", 0),
            num_tokens=heard.usage.get("completion_tokens", len(heard.words_s)),
            text="".join(heard.texts),
            failure=failure,
        )
        self._done(served)
        return served

    async def _hear(self, asked: AskedRequest, heard: "_Heard", *, model: str) -> None:
        body = {
            "model": model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": self._settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._settings.ignore_eos else {}),
        }
        async with self._client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                openai_server.check(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if event := openai_server.event(line):
                    heard.take(event, now_s=self._clock())


class _Heard:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self.words_s: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, int] = {}
        self.finished = False

    def take(self, event: dict[str, Any], *, now_s: float) -> None:
        """One more event."""
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if choice["text"]:
                self.words_s.append(now_s)
                self.texts.append(choice["text"])
            self.finished = self.finished or choice["finish_reason"] is not None
