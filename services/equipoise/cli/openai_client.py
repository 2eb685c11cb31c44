"""The part of OpenAI's API that `generate` and `bench` use, as any compatible server has it."""

import json
import os
from collections.abc import Mapping
from typing import Any

import httpx2

from equipoise.settings.errors import InvalidSettingsError


def base_url(url: str) -> str:
    """The base URL of API paths, for a URL with or without /v1."""
    return url.rstrip("/").removesuffix("/v1") + "/v1/"


def headers(api_key: str) -> Mapping[str, str]:
    """The authorization header; the first line of $OPENAI_API_KEY is the default key."""
    key = api_key or os.environ.get("OPENAI_API_KEY", "").strip().partition("\n")[0]
    return {"Authorization": f"Bearer {key}"} if key else {}


def event(line: str) -> dict[str, Any] | None:
    """Parse a line of a stream; None if it holds no event.

    Raises:
        InvalidSettingsError: the server reports an error, or the line is not valid JSON.
    """
    if not line.startswith("data:") or line == "data: [DONE]":
        return None
    try:
        document = json.loads(line.removeprefix("data:"))
    except ValueError:
        raise InvalidSettingsError(
            f"the server's stream is not valid JSON: {line[:80]!r}"
        ) from None
    if "error" in document:
        raise InvalidSettingsError(f"the server reports: {_message(document)}")
    assert isinstance(document, dict)
    return document


def check(status: int, content: bytes) -> None:
    """Check the status of a response.

    Raises:
        InvalidSettingsError: it is an error; the message quotes the server.
    """
    if status != 200:
        try:
            message = _message(json.loads(content))
        except (ValueError, AttributeError):
            message = content[:200].decode(errors="replace")
        raise InvalidSettingsError(f"the server returned {status}: {message}")


def unreachable(url: str, error: httpx2.HTTPError | httpx2.InvalidURL) -> InvalidSettingsError:
    """The error for a server that cannot be reached."""
    return InvalidSettingsError(f"cannot reach --url {url}: {str(error) or type(error).__name__}")


def first_model(content: bytes) -> str:
    """The first model in a response of /v1/models.

    Raises:
        InvalidSettingsError: it lists none.
    """
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise InvalidSettingsError("the server lists no model: use --model") from None


def _message(document: dict[str, Any]) -> str:
    error = document.get("error", document)
    return str(error.get("message", error) if isinstance(error, dict) else error)
