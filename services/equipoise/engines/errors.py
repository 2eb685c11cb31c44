"""Why a plugin leaves its engine alone."""

import logging
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class UnsupportedEngineError(Exception):
    """This engine cannot be balanced as it was started; the message names the remedy."""


def attempt(make: Callable[[], _T]) -> _T | None:
    """Return what `make` returns; None, with the reason in the log, if it fails.

    Whatever is wrong, the engine must serve.
    """
    try:
        return make()
    except (UnsupportedEngineError, ValueError) as error:
        _log.error("Equipoise leaves this engine alone: %s", error)
    except Exception:  # noqa: BLE001 - see above
        _log.exception("Equipoise leaves this engine alone: the plugin does not fit this release")
    return None
