"""What a stream of `Inference` that ends early says of its request."""

from enum import StrEnum

BLAME_KEY = "equipoise-blame"
"""Key of the trailing metadata with which a worker ends a stream early."""


class Blame(StrEnum):
    """How far a request is the cause of its stream's end."""

    NONE = "none"
    """It is not: the worker stops, its group is gone, or the request was not in the failed step."""

    STEP = "step"
    """It was one of several requests in a step that failed."""

    REQUEST = "request"
    """It failed by itself, or was the only request in a step that failed."""
