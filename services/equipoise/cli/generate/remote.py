"""`texts`: a completion by an OpenAI-compatible server."""

from collections.abc import Generator
from typing import Any

import httpx2

from equipoise.cli import openai_client
from equipoise.cli.generate.settings import GenerateSettings


def texts(settings: GenerateSettings, prompt: str, *, seed: int) -> Generator[str, None, None]:
    """Yield pieces of the completion as they arrive.

    Raises:
        InvalidSettingsError: the server rejects the request, fails or is unreachable.
    """
    try:
        with httpx2.Client(
            base_url=openai_client.base_url(settings.url),
            headers=openai_client.headers(settings.api_key),
            timeout=settings.timeout_s,
        ) as client:
            model = settings.model
            if not model:
                answer = client.get("models")
                openai_client.check(answer.status_code, answer.content)
                model = openai_client.first_model(answer.content)
            body = _body(settings, prompt, model=model, seed=seed)
            with client.stream("POST", "completions", json=body) as response:
                if response.status_code != 200:
                    openai_client.check(response.status_code, response.read())
                for line in response.iter_lines():
                    if event := openai_client.event(line):
                        yield from (choice["text"] for choice in event["choices"])
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise openai_client.unreachable(settings.url, error) from None


def _body(settings: GenerateSettings, prompt: str, *, model: str, seed: int) -> dict[str, Any]:
    """The request. Fields beyond OpenAI's are sent only if set: few servers know them all."""
    extensions = {
        "top_k": (settings.top_k, 0),
        "min_p": (settings.min_p, 0.0),
        "repetition_penalty": (settings.repetition_penalty, 1.0),
        "ignore_eos": (settings.ignore_eos, False),
    }
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "seed": seed,
        "stop": list(settings.stop) or None,
        "stream": True,
        **{name: value for name, (value, off) in extensions.items() if value != off},
    }
