"""What `generate` and `bench` need of a server of OpenAI's form: its address, key, words and model.

Knows the form that any such server has, and nothing of ours.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import httpx2

from equipoise.cli.offline.settings import ToolInputError


def base_url(url: str) -> str:
    """The address that paths go behind, whether /v1 was given with it or not."""
    return url.rstrip("/").removesuffix("/v1") + "/v1/"


def headers(api_key: str) -> Mapping[str, str]:
    """What says who asks; the environment's key unless one is given."""
    key = api_key or os.environ.get("OPENAI_API_KEY", "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def event(line: str) -> dict[str, Any] | None:
    """The object of a stream's line; None for lines without one.

    Raises:
        ToolInputError: the server tells an error, or what it sends is no event.
    """
    if not line.startswith("data:") or line == "data: [DONE]":
        return None
    try:
        document = json.loads(line.removeprefix("data:"))
    except ValueError:
        raise ToolInputError(f"the server's stream has no JSON: {line[:80]!r}") from None
    if "error" in document:
        raise ToolInputError(f"the server: {_message(document)}")
    assert isinstance(document, dict)
    return document


def check(status: int, content: bytes) -> None:
    """See that an answer is one.

    Raises:
        ToolInputError: it is an error; with the server's own words.
    """
    if status != 200:
        try:
            words = _message(json.loads(content))
        except (ValueError, AttributeError):
            words = content[:200].decode(errors="replace")
        raise ToolInputError(f"the server answers {status}: {words}")


def unreachable(url: str, error: httpx2.HTTPError | httpx2.InvalidURL) -> ToolInputError:
    """What to tell when there is no answer."""
    return ToolInputError(f"--url {url}: {error or type(error).__name__}")


def first_model(content: bytes) -> str:
    """The first model of the answer of /v1/models.

    Raises:
        ToolInputError: there is none.
    """
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ToolInputError("the server lists no model: name one with --model") from None


def _message(document: dict[str, Any]) -> str:
    error = document.get("error", document)
    return str(error.get("message", error) if isinstance(error, dict) else error)
