"""`Clients`: HTTP clients of the gateway that keep sending requests, and their answers."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import httpx2

from equipoise.cli.demo.traffic import Prompt
from tests.support.chaos.checks import NEXT_TOKEN_BOUND_S
from tests.support.chaos.history import Answer, History

_TURNED_AWAY = {429, 503}
_POLL_S = 0.1


class Clients:
    """Closed-loop clients: each asks, reads to the end, asks again. `history` may be exchanged."""

    def __init__(
        self, gateway: str, *, answers: Mapping[Prompt, Sequence[int]], history: History
    ) -> None:
        self.history = history
        self.num_whole = 0
        self._num_asking = 0
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._gateway = gateway
        self._answers = answers
        self._of_domain = {
            domain: itertools.cycle(list(prompts))
            for domain, prompts in itertools.groupby(answers, key=lambda prompt: prompt.domain)
        }
        self._domain = next(iter(self._of_domain))

    def shift_to(self, domain: str) -> None:
        """Requests that start from now on are of this domain."""
        self._domain = domain

    async def run(self, num_clients: int) -> None:
        """Ask until cancelled."""
        async with self._http() as http, asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(self._ask_on(http))

    async def ask(self, prompt: Prompt) -> Answer:
        """Ask once; the history does not have it."""
        async with self._http() as http:
            return await self._ask(http, prompt)

    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"http://{self._gateway}", timeout=NEXT_TOKEN_BOUND_S + 5.0
        )

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Send no requests in the block, which begins when the open ones have ended."""
        self._may_ask.clear()
        try:
            while self._num_asking:  # noqa: ASYNC110 - polled as `until_whole` polls
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            self._may_ask.set()

    async def until_whole(self, more: int, *, timeout_s: float) -> None:
        """Wait until that many more requests have ended.

        Raises:
            TimeoutError: no client received a token within the bound.
        """
        wanted, began_s = self.num_whole + more, time.monotonic()
        while self.num_whole < wanted:
            last_s = max([began_s, *self.history.token_times_s[-1:]])
            if time.monotonic() >= last_s + timeout_s:
                raise TimeoutError
            await asyncio.sleep(_POLL_S)

    async def _ask_on(self, http: httpx2.AsyncClient) -> None:
        while True:
            await self._may_ask.wait()
            self._num_asking += 1
            try:
                answer = await self._ask(http, next(self._of_domain[self._domain]))
            finally:
                self._num_asking -= 1
            self.history.answers.append(answer)
            if answer.rejection or answer.breakage:
                await asyncio.sleep(0.2)
                continue
            self.num_whole += 1

    async def _ask(self, http: httpx2.AsyncClient, prompt: Prompt) -> Answer:
        tokens: list[int] = []
        rejection = breakage = ""
        times_s = [time.monotonic()]
        body = {
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code in _TURNED_AWAY:
                    rejection = (await response.aread()).decode()
                elif response.status_code != 200:
                    breakage = f"{response.status_code}: {(await response.aread()).decode()}"
                else:
                    breakage = await self._read(response, tokens, times_s)
        except httpx2.HTTPError as error:
            breakage = f"{type(error).__name__}: {error}"
        return Answer(
            prompt=f"{prompt.domain}: {bytes(prompt.tokens)[-24:].decode(errors='replace')}",
            tokens=tuple(tokens),
            expected=tuple(self._answers[prompt]),
            longest_wait_s=max(
                later - sooner for sooner, later in itertools.pairwise([*times_s, time.monotonic()])
            ),
            rejection=rejection,
            breakage=breakage,
        )

    async def _read(
        self, response: httpx2.Response, tokens: list[int], times_s: list[float]
    ) -> str:
        """Why the stream did not come to its end; empty if it did."""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return ""
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return f"after {len(tokens)} tokens: {event['error']}"
            for choice in event["choices"]:
                if choice["token_ids"]:
                    times_s.append(time.monotonic())
                    self.history.token_times_s.append(times_s[-1])
                tokens += choice["token_ids"]
        return f"the stream ended after {len(tokens)} tokens without [DONE]"
