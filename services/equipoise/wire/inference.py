"""Conversion of the `Inference` contract's messages, checked in both directions."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain

from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.inference_messages import (
    BLAME_KEY,
    MAX_AFTER_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    Blame,
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    Grammar,
    GrammarKind,
    LatentHold,
    LatentSource,
    PromptReport,
    Sampling,
    TokenLogprob,
)
from equipoise_api.v1 import worker_pb2 as pb

_FINISH_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}

_LOGPROBS_PER_PART = 2048
"""At most 0.6 MB, below gRPC's limit."""


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Convert a request."""
    grammar = request.grammar
    return pb.GenerateRequest(
        request_id=request.request_id,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        stop_tokens=sorted(request.stop_tokens),
        sampling=pb.Sampling(**asdict(request.sampling)),
        num_replayed=request.num_replayed,
        prompt_logprobs=request.prompt_logprobs,
        min_tokens=request.min_tokens,
        logit_bias=dict(request.logit_bias),
        hold_latents=request.hold_latents,
        latents_from=_source_to_proto(request.latents_from) if request.latents_from else None,
        grammar=None if grammar is None else _grammar_to_proto(grammar),
    )


def request_from_proto(
    message: pb.GenerateRequest, *, vocab_size: int, context_length: int
) -> GenerateRequest:
    """Convert and check a request. `context_length` bounds prompt and output together, tokens.

    Raises:
        InvalidMessageError: the request cannot be served; names the field and the limit.
    """
    num_prompt, total = len(message.prompt), len(message.prompt) + message.max_tokens
    if not num_prompt:
        raise _invalid_request("the prompt is empty: send at least one token")
    if message.max_tokens < 1:
        raise _invalid_request("max_tokens is 0: ask for at least one token")
    if total > context_length:
        raise _invalid_request(
            f"{num_prompt} prompt tokens and max_tokens {message.max_tokens} add up to {total} "
            f"tokens, more than this worker's context of {context_length}"
        )
    if message.num_replayed >= num_prompt:
        raise _invalid_request(
            f"num_replayed is {message.num_replayed}: it must be less than the {num_prompt} tokens "
            f"of the prompt"
        )
    most_min = message.max_tokens + message.num_replayed
    if message.min_tokens > most_min:
        raise _invalid_request(
            f"min_tokens is {message.min_tokens}: it must be at most max_tokens, {most_min}"
        )
    if message.HasField("prompt_logprobs") and message.prompt_logprobs > MAX_LOGPROBS:
        raise _invalid_request(
            f"prompt_logprobs is {message.prompt_logprobs}: it must be at most {MAX_LOGPROBS}"
        )
    _check_tokens(message, vocab_size=vocab_size)
    return GenerateRequest(
        request_id=checks.name("generate", "request_id", message.request_id or "unnamed"),
        prompt=tuple(message.prompt),
        max_tokens=message.max_tokens,
        stop_tokens=frozenset(message.stop_tokens),
        sampling=_sampling_from_proto(message.sampling),
        num_replayed=message.num_replayed,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        min_tokens=message.min_tokens,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        hold_latents=message.hold_latents,
        latents_from=(
            _source_from_proto(message.latents_from) if message.HasField("latents_from") else None
        ),
        grammar=_grammar_from_proto(message) if message.HasField("grammar") else None,
    )


def _check_tokens(message: pb.GenerateRequest, *, vocab_size: int) -> None:
    for name, listed in ("stop_tokens", message.stop_tokens), ("logit_bias", message.logit_bias):
        if len(listed) > MAX_LISTED_TOKENS:
            raise _invalid_request(f"{name} has more than {MAX_LISTED_TOKENS} tokens")
    for token in chain(message.prompt, message.stop_tokens, message.logit_bias):
        if token >= vocab_size:
            raise _invalid_request(
                f"token {token} is not in the vocabulary: tokens are 0 to {vocab_size - 1}"
            )


def _prompt_report_to_proto(report: PromptReport) -> list[pb.PromptReport]:
    """Convert a report to parts of bounded size, at least one; their logprobs are consecutive."""
    size = _LOGPROBS_PER_PART
    return [
        pb.PromptReport(
            cached_tokens=report.num_cached,
            logprobs=map(_logprob_to_proto, report.logprobs[first : first + size]),
        )
        for first in range(0, max(1, len(report.logprobs)), size)
    ]


def _prompt_report_from_proto(
    parts: Sequence[pb.PromptReport], *, request: GenerateRequest, vocab_size: int
) -> PromptReport | None:
    """Convert and check the parts of a report; None if there are none and none are due.

    Raises:
        InvalidMessageError: no worker that serves this request sends them.
    """
    logprobs = [one for part in parts for one in part.logprobs]
    if len(logprobs) != request.num_prompt_logprobs:
        raise _invalid_response(
            f"it sent {len(logprobs)} logprobs of the prompt instead of "
            f"{request.num_prompt_logprobs}"
        )
    if not parts:
        return None
    num_cached = parts[-1].cached_tokens
    if num_cached >= len(request.prompt):
        raise _invalid_response(
            f"it found {num_cached} cached tokens of a prompt of {len(request.prompt)}"
        )
    return PromptReport(
        num_cached=num_cached,
        logprobs=tuple(_logprob_from_proto(one, vocab_size) for one in logprobs),
    )


def response_to_proto(
    generated: GeneratedTokens, *, generation: int, step: int, epoch: int
) -> list[pb.GenerateResponse]:
    """Convert tokens, and before them the parts of the prompt's report that do not fit with them.

    `generation`, `step` and `epoch` are those of the last token.
    """
    parts = [None] if generated.prompt is None else _prompt_report_to_proto(generated.prompt)
    *earlier, last = parts
    tokens = pb.GenerateResponse(
        tokens=generated.tokens,
        finish_reason=_FINISH_TO_PROTO[generated.finish],
        generation=generation,
        step=step,
        epoch=epoch,
        logprobs=map(_logprob_to_proto, generated.logprobs),
        prompt=last,
        held=None if generated.held is None else pb.LatentHold(**asdict(generated.held)),
    )
    return [*(pb.GenerateResponse(prompt=part) for part in earlier), tokens]


def waiting_to_proto(*, epoch: int, step: int) -> pb.GenerateResponse:
    """Convert the report that a request waits while steps run; the latest step."""
    return pb.GenerateResponse(epoch=epoch, step=step, is_waiting=True)


def response_from_proto(
    message: pb.GenerateResponse,
    *,
    request: GenerateRequest,
    num_before: int,
    vocab_size: int,
    prompt: Sequence[pb.PromptReport] = (),
) -> GeneratedTokens:
    """Convert and check tokens that follow `num_before` earlier ones.

    `prompt` has all parts of the prompt's report, if these are the first tokens.
    The end is computed from the request, so that no rank can end a stream early or late.

    Raises:
        InvalidMessageError: no worker that serves this request sends that.
    """
    finish: FinishReason | None = None
    for num_tokens, token in enumerate(message.tokens, start=num_before + 1):
        if finish is not None:
            raise _invalid_response(f"it sent tokens after the request's end ({finish})")
        if token >= vocab_size:
            raise _invalid_response(f"it sent token {token}: tokens are 0 to {vocab_size - 1}")
        if token in request.stop_tokens:
            finish = FinishReason.STOP
        elif num_tokens == request.max_tokens:
            finish = FinishReason.LENGTH
    if message.finish_reason and message.finish_reason != _FINISH_TO_PROTO[finish]:
        raise _invalid_response(
            f"it sent finish reason {_name_of(message.finish_reason)} after "
            f"{num_before + len(message.tokens)} of {request.max_tokens} tokens"
        )
    num_logprobs = len(message.tokens) if request.sampling.logprobs is not None else 0
    if len(message.logprobs) != num_logprobs:
        raise _invalid_response(
            f"it sent {len(message.logprobs)} logprobs with {len(message.tokens)} tokens"
        )
    return GeneratedTokens(
        tokens=tuple(message.tokens),
        finish=finish,
        logprobs=tuple(_logprob_from_proto(one, vocab_size) for one in message.logprobs),
        prompt=None
        if num_before
        else _prompt_report_from_proto(prompt, request=request, vocab_size=vocab_size),
        held=_hold_from_proto(message.held) if message.HasField("held") else None,
    )


def blame_from_metadata(metadata: Sequence[tuple[str, str | bytes]]) -> Blame:
    """The blame in a stream's trailing metadata.

    A rank that dies sends none, and any of its requests may be the cause: `STEP`.
    """
    value = dict(metadata).get(BLAME_KEY)
    return next((blame for blame in Blame if blame == value), Blame.STEP)


def _source_to_proto(source: LatentSource) -> pb.LatentSource:
    return pb.LatentSource(**asdict(source))


def _source_from_proto(message: pb.LatentSource) -> LatentSource:
    kind = "generate"
    return LatentSource(
        address=checks.address(kind, "latents_from.address", message.address),
        **checks.names(kind, message, "pool", "worker", "boot_id"),
        hold=checks.count(kind, "latents_from.hold", message.hold),
    )


def _hold_from_proto(message: pb.LatentHold) -> LatentHold:
    return LatentHold(
        boot_id=checks.name("generate_response", "boot_id", message.boot_id),
        hold=checks.count("generate_response", "hold", message.hold, least=1),
        num_tokens=message.num_tokens,
    )


def _grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(**{grammar.kind.value: grammar.text}, after=grammar.after)


def _grammar_from_proto(message: pb.GenerateRequest) -> Grammar:
    kind = message.grammar.WhichOneof("kind")
    text = getattr(message.grammar, kind) if kind else ""
    if kind is None or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _invalid_request(f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes of one kind")
    if len(message.grammar.after.encode()) > MAX_AFTER_BYTES:
        raise _invalid_request(f"grammar.after must have at most {MAX_AFTER_BYTES} bytes")
    if message.min_tokens:
        raise _invalid_request("min_tokens must be 0 with a grammar, which says where outputs end")
    return Grammar(kind=GrammarKind(kind), text=text, after=message.grammar.after)


def _sampling_from_proto(message: pb.Sampling) -> Sampling:
    unset = {n for n in ("top_p", "repetition_penalty", "logprobs") if not message.HasField(n)}
    names = [field.name for field in pb.Sampling.DESCRIPTOR.fields]
    return Sampling(**{name: getattr(message, name) for name in names if name not in unset})


def _logprob_to_proto(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        logprob=logprob.value,
        top_tokens=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _logprob_from_proto(message: pb.TokenLogprob, vocab_size: int) -> TokenLogprob:
    tokens, values = message.top_tokens, message.top_logprobs
    if len(tokens) != len(values) or any(token >= vocab_size for token in tokens):
        raise _invalid_response("it sent logprobs of tokens that do not exist")
    if not all(value < math.inf for value in (message.logprob, *values)):
        raise _invalid_response("it sent a logprob that is NaN or infinite")
    return TokenLogprob(value=message.logprob, top=tuple(zip(tokens, values, strict=True)))


def _name_of(finish_reason: int) -> str:
    known = pb.FinishReason.DESCRIPTOR.values_by_number.get(finish_reason)
    return known.name if known else str(finish_reason)


def _invalid_request(message: str) -> InvalidMessageError:
    return InvalidMessageError("generate_request", message)


def _invalid_response(message: str) -> InvalidMessageError:
    return InvalidMessageError("generate_response", message)
