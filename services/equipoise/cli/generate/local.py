"""`texts`: a completion by a worker's engine in this process. Imports torch."""

import sys
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from equipoise.cli.generate.settings import GenerateSettings
from equipoise.gateway.choice import ChoiceDecoder
from equipoise.gateway.tokenizer import Tokenizer
from equipoise.rank.errors import WorkerError
from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry.loading import Loading
from equipoise.wire.inference_messages import GeneratedTokens
from equipoise.worker.alone import engine_alone
from equipoise.worker.engine import Engine, StepResult
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model.sampling_params import SamplingError, SamplingParams

_LOOK_S = 1.0
"""How often to check that the engine still runs while no step completes."""


def texts(settings: GenerateSettings, prompt: str, *, seed: int) -> Generator[str, None, None]:
    """Yield pieces of the completion as they are generated.

    Raises:
        InvalidSettingsError: a sampling parameter is out of range, or the prompt is not UTF-8.
        GatewayError, CheckpointError, WorkerError: the checkpoint cannot be used.
    """
    sampling = _sampling(settings, seed=seed)
    tokenizer = Tokenizer.of_checkpoint(settings.checkpoint)
    try:
        tokens = tokenizer.encode(prompt)
    except UnicodeEncodeError:
        raise InvalidSettingsError("the prompt is not valid UTF-8") from None
    ends = frozenset() if settings.ignore_eos else tokenizer.end_tokens
    request = Request(
        key=1,
        prompt=tokens,
        max_tokens=settings.max_tokens,
        stop_tokens=ends,
        sampling=sampling,
    )
    steps: SimpleQueue[StepResult] = SimpleQueue()
    engine = engine_alone(
        WorkerSettings(
            checkpoint=settings.checkpoint,
            max_requests=1,
            context_length=len(request.prompt) + request.max_tokens,
        ),
        publish=steps.put,
        loading=Loading(say=_say),
    )
    choice = ChoiceDecoder(tokenizer, stops=settings.stop, stop_tokens=ends)
    with _running(engine) as ended:
        engine.submit(request)
        for generated in _generated(steps, ended):
            delta = choice.read(generated)
            yield delta.text
            if delta.finish is not None:
                return


def _say(line: str, _done: int, _total: int) -> None:
    """Report progress on stderr; stdout carries the completion only."""
    print(line, file=sys.stderr, flush=True)


def _generated(steps: SimpleQueue[StepResult], ended: Future[None]) -> Iterator[GeneratedTokens]:
    while True:
        try:
            result = steps.get(timeout=_LOOK_S)
        except Empty:
            if ended.done():
                ended.result()
            continue
        for emission in result.emissions:
            if emission.sampled.fault:
                raise WorkerError(f"no next token: {emission.sampled.fault}")
            yield GeneratedTokens(tokens=(emission.token,), finish=emission.finish)


@contextmanager
def _running(engine: Engine) -> Iterator[Future[None]]:
    """Run the engine on its own thread inside the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
        ended = thread.submit(engine.run)
        try:
            yield ended
        finally:
            engine.leave()


def _sampling(settings: GenerateSettings, *, seed: int) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            seed=seed,
        )
    except SamplingError as error:
        raise InvalidSettingsError(f"--{str(error).replace('_', '-')}") from None
