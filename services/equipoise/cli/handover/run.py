"""`equipoise handover`: send one prompt through a gateway of two pools; did its latents travel?

Answers are the same if they do not: the decode rank prefills the prompt again.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from equipoise.cli import openai_client
from equipoise.cli.display import print_json
from equipoise.cli.handover.settings import HandoverSettings
from equipoise.settings.errors import InvalidSettingsError

EXIT_NOT_HANDED_OVER = 3

LEAST_SHARE = 0.5
"""Share of the prompt that a decode rank must get: only its full blocks are handed over."""

MAX_DEFAULT_TOKENS = 2048
NUM_GENERATED = 4
WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Where one prompt was prefilled."""

    prompt_tokens: int
    """Tokens of the prompt."""

    handed_over_tokens: int | None
    """Those whose latents the decode rank got; None if no prefill rank ran the prompt."""

    @property
    def worked(self) -> bool:
        """Whether the decode rank got the prompt's full blocks."""
        return (self.handed_over_tokens or 0) >= LEAST_SHARE * self.prompt_tokens

    def __str__(self) -> str:
        """One line for people."""
        prompt = f"a prompt of {self.prompt_tokens} tokens"
        if self.handed_over_tokens is None:
            return (
                f"{prompt} was not handed over: the decode pool prefilled it "
                "(equipoise_gateway_direct_total says why)"
            )
        if not self.worked:
            return (
                f"{prompt} was handed over, but the decode rank got the latents of "
                f"{self.handed_over_tokens} tokens only (equipoise_worker_latent_pulls_total "
                "of the decode pool says why)"
            )
        rest = self.prompt_tokens - self.handed_over_tokens
        return (
            f"{prompt} was handed over: the decode rank got the latents of "
            f"{self.handed_over_tokens} tokens and prefilled {rest}"
        )


def run(settings: HandoverSettings) -> int:
    """Print what became of the prompt; return 3 if its latents were not handed over.

    Raises:
        InvalidSettingsError: the gateway is unreachable or rejects the request.
    """
    try:
        with httpx2.Client(
            base_url=settings.url.rstrip("/").removesuffix("/v1"),
            headers=openai_client.headers(settings.api_key),
            timeout=settings.timeout_s,
        ) as client:
            found = _send(client, settings)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise openai_client.unreachable(settings.url, error) from None
    if settings.json:
        print_json(asdict(found))
    else:
        print(found)
    return 0 if found.worked else EXIT_NOT_HANDED_OVER


def _send(client: httpx2.Client, settings: HandoverSettings) -> Handover:
    models = _answer(client.get("/v1/models"))["data"]
    if not models:
        raise InvalidSettingsError("the server lists no model: use --model")
    model = settings.model or str(models[0]["id"])
    context = next((one.get("max_model_len") for one in models if one["id"] == model), None)
    count = settings.prompt_tokens or min(MAX_DEFAULT_TOKENS, (context or MAX_DEFAULT_TOKENS) // 2)
    # No rank has cached the latents of a random text.
    text = " ".join(secrets.token_hex(WORD_BYTES) for _ in range(count))
    tokens = _answer(client.post("/tokenize", json={"model": model, "prompt": text}))["tokens"]
    body = {
        "model": model,
        "prompt": tokens[:count],
        "max_tokens": NUM_GENERATED,
        "min_tokens": NUM_GENERATED,
        "temperature": 0,
    }
    usage = _answer(client.post("/v1/completions", json=body))["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Handover(
        prompt_tokens=usage["prompt_tokens"],
        handed_over_tokens=details.get("handed_over_tokens"),
    )


def _answer(response: httpx2.Response) -> Mapping[str, Any]:
    openai_client.check(response.status_code, response.content)
    try:
        document = response.json()
    except json.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise InvalidSettingsError(f"{response.url} does not answer like a gateway of Equipoise")
    return document
