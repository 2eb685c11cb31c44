"""What can go wrong for a client, with the answer that HTTP and OpenAI's form have for it."""

from equipoise.wire.inference import Blame

QUEUE_RETRY_AFTER_S = 1
DOWN_RETRY_AFTER_S = 5


class GatewayError(Exception):
    """The gateway cannot start or go on; the message is the one line that a person reads."""


class RequestError(GatewayError):
    """One request cannot be answered; the message is what its client reads.

    `status` is HTTP's, `kind`, `code` and `param` are those of OpenAI's error object;
    `retry_after_s` is None where trying again is of no use.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(_encodable(message))
        self.param = None if param is None else _encodable(param)


def _encodable(text: str) -> str:
    """The text with unpaired surrogates, which JSON strings may have and UTF-8 not, escaped."""
    return text.encode(errors="backslashreplace").decode()


class InvalidRequestError(RequestError):
    """The client asked for what cannot be served; names the field and the limit."""

    status = 400
    kind = "invalid_request_error"


class UnknownModelError(InvalidRequestError):
    """Another model is served here."""

    status = 404
    code = "model_not_found"


class UnauthorizedError(InvalidRequestError):
    """The request has no API key, or none of those that are let in."""

    status = 401
    code = "invalid_api_key"


class BodyTooLargeError(InvalidRequestError):
    """The body is above the limit."""

    status = 413
    code = "body_too_large"


class BodyTooSlowError(InvalidRequestError):
    """The body did not arrive within the bound."""

    status = 408
    code = "body_timeout"


class TooManyRequestsError(RequestError):
    """As many requests are open as this gateway answers at a time."""

    status = 429
    kind = "rate_limit_error"
    code = "too_many_requests"
    retry_after_s = QUEUE_RETRY_AFTER_S


class QueueFullError(RequestError):
    """As many requests as may wait for a rank are waiting already."""

    status = 503
    code = "queue_full"
    retry_after_s = QUEUE_RETRY_AFTER_S


class NoRankError(RequestError):
    """No rank took the request within the bound."""

    status = 503
    code = "pool_unavailable"
    retry_after_s = DOWN_RETRY_AFTER_S


class StoppingError(RequestError):
    """This gateway is being stopped; another one may serve."""

    status = 503
    code = "gateway_stopping"
    retry_after_s = QUEUE_RETRY_AFTER_S


class AttemptsExhaustedError(RequestError):
    """Every rank that began this request broke; whoever sends it again may break more."""

    status = 502
    code = "attempts_exhausted"


class PoisonRequestError(RequestError):
    """Ranks break when they run this request; it is not tried on another one.

    Not a 5xx status, because clients retry those by themselves.
    """

    status = 422
    kind = "invalid_request_error"
    code = "poison_request"


class ClientGoneError(GatewayError):
    """The client hung up or does not read; there is nobody to answer."""


class RankLostError(GatewayError):
    """A rank did not bring a request to its end; another one may. The message says how.

    `blame` is how far the request may be the cause.
    """

    def __init__(self, message: str, *, blame: Blame = Blame.NONE) -> None:
        super().__init__(message)
        self.blame = blame


class RankFullError(GatewayError):
    """A rank has no place in its line now; nothing is wrong with it."""
