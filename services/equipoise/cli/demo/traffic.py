"""`Traffic`: clients that send prompts of one domain at a time and record every token's time.

`result` evaluates the records.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import grpc
import numpy as np

from equipoise.telemetry.logs import printable
from equipoise_api.v1 import worker_pb2, worker_pb2_grpc

REQUEST_TIMEOUT_S = 60.0
"""Default deadline of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One distinct request."""

    domain: str
    """Kind of text."""

    tokens: tuple[int, ...]
    """Prompt tokens."""

    max_tokens: int
    """Number of tokens to generate."""

    def __post_init__(self) -> None:
        assert self.tokens
        assert self.max_tokens >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrival:
    """One message of a worker."""

    time_s: float
    """When it arrived, Unix seconds."""

    tokens: tuple[int, ...]
    """Generated tokens."""

    generation: int
    """Generation of the step that made them."""

    step: int
    """Number of that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that ended."""

    prompt: Prompt
    """The request."""

    rank: int
    """Rank that served it."""

    arrivals: tuple[TokenArrival, ...]
    """Messages received."""

    failure: str | None
    """Why it failed; None on success."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Generated tokens in order."""
        return tuple(token for arrival in self.arrivals for token in arrival.tokens)


class TimeSpan(NamedTuple):
    """A period of time, Unix seconds."""

    from_s: float
    to_s: float


class Traffic:
    """Closed-loop clients: each sends a request, reads its tokens, and sends the next.

    Clients take the prompts of the current domain in turn. `shift_to` affects new requests only, as
    in real traffic.
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        addresses: Sequence[str],
        clients_per_rank: int,
        clock: Callable[[], float],
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        assert all(prompts.values())
        self.completions: list[Completion] = []
        self.gaps: list[TimeSpan] = []
        """Between two messages of one request, each of which carries the token of one step."""
        self.num_tokens = 0
        self._prompts = {domain: cycle(these) for domain, these in prompts.items()}
        self._addresses = tuple(addresses)
        self._clients_per_rank = clients_per_rank
        self._clock = clock
        self._timeout_s = timeout_s
        self._domain = next(iter(prompts))
        self._ending = False
        self._num_requests = 0

    def shift_to(self, domain: str) -> None:
        """Send requests of this domain from now on."""
        assert domain in self._prompts
        self._domain = domain

    def end(self) -> None:
        """Send no more requests; `run` returns when those in flight have ended."""
        self._ending = True

    async def run(self) -> None:
        """Keep all ranks busy until `end`; failed requests are recorded, not raised."""
        async with asyncio.TaskGroup() as clients:
            for rank, address in enumerate(self._addresses):
                clients.create_task(self._load_rank(rank, address))

    async def _load_rank(self, rank: int, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as clients:
            stub = worker_pb2_grpc.InferenceStub(channel)
            for _ in range(self._clients_per_rank):
                clients.create_task(self._be_client(stub, rank))

    async def _be_client(self, stub: "worker_pb2_grpc.InferenceAsyncStub", rank: int) -> None:
        while not self._ending:
            completion = await self._request(stub, rank, next(self._prompts[self._domain]))
            self.completions.append(completion)
            if completion.failure is not None:
                # Do not flood a worker that rejects requests at once.
                await asyncio.sleep(0.5)

    async def _request(
        self, stub: "worker_pb2_grpc.InferenceAsyncStub", rank: int, prompt: Prompt
    ) -> Completion:
        self._num_requests += 1
        arrivals: list[TokenArrival] = []
        failure = None
        call = stub.Generate(
            worker_pb2.GenerateRequest(
                request_id=f"demo-{self._num_requests}",
                prompt=prompt.tokens,
                max_tokens=prompt.max_tokens,
            ),
            timeout=self._timeout_s,
        )
        try:
            async for response in call:
                if not response.tokens:
                    continue
                self.num_tokens += len(response.tokens)
                now_s = self._clock()
                if arrivals:
                    self.gaps.append(TimeSpan(arrivals[-1].time_s, now_s))
                arrivals.append(
                    TokenArrival(
                        time_s=now_s,
                        tokens=tuple(response.tokens),
                        generation=response.generation,
                        step=response.step,
                    )
                )
        except grpc.aio.AioRpcError as error:
            failure = f"rank {rank}: {error.code().name}: {printable(error.details() or '')}"
        else:
            generated = sum(len(arrival.tokens) for arrival in arrivals)
            if generated != prompt.max_tokens:
                failure = f"rank {rank}: received {generated} tokens, not {prompt.max_tokens}"
        return Completion(
            prompt=prompt,
            rank=rank,
            arrivals=tuple(arrivals),
            failure=failure,
        )


def prompts_of(
    domain: str, texts: Sequence[bytes], *, max_tokens: tuple[int, int], seed: int
) -> tuple[Prompt, ...]:
    """One prompt per text, one token per byte, with output lengths from an inclusive range.

    The lengths differ so that clients do not finish in lockstep.
    """
    rng = np.random.default_rng([seed, len(texts)])
    lengths = rng.integers(max_tokens[0], max_tokens[1] + 1, size=len(texts))
    return tuple(
        Prompt(domain=domain, tokens=tuple(text), max_tokens=int(length))
        for text, length in zip(texts, lengths, strict=True)
    )
