"""Errors of the gateway, with the HTTP status and OpenAI's error fields of those clients see."""

from equipoise.wire.inference_messages import Blame

QUEUE_RETRY_AFTER_S = 1
DOWN_RETRY_AFTER_S = 5


class GatewayError(Exception):
    """The gateway cannot start or continue; the message is one line for the operator."""


class RequestError(GatewayError):
    """A request cannot be answered; the message is for its client.

    `status` is HTTP's. `kind`, `code` and `param` are fields of OpenAI's error object.
    `retry_after_s` is None where a retry is pointless. `ends_connection` is set if the rest of the
    request is not read.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None
    ends_connection = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(_encodable(message))
        self.param = None if param is None else _encodable(param)


def _encodable(text: str) -> str:
    """The text with unpaired surrogates escaped: JSON strings may have them, UTF-8 may not."""
    return text.encode(errors="backslashreplace").decode()


class InvalidRequestError(RequestError):
    """The request is invalid or not supported; names the field and the limit."""

    status = 400
    kind = "invalid_request_error"


class UnknownModelError(InvalidRequestError):
    """The request is for a model that is not served here."""

    status = 404
    code = "model_not_found"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and output together are longer than the ranks' context."""

    code = "context_length_exceeded"


class GrammarLimitError(InvalidRequestError):
    """What the output must match became too complex for any rank after some tokens."""

    code = "grammar_too_complex"


class UnauthorizedError(InvalidRequestError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class BodyTooLargeError(InvalidRequestError):
    """The body exceeds the limit."""

    status = 413
    code = "body_too_large"
    ends_connection = True


class HeaderTooLongError(InvalidRequestError):
    """The header exceeds the limit."""

    status = 431
    code = "header_too_long"


class BodyTooSlowError(InvalidRequestError):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"
    ends_connection = True


class TooManyRequestsError(RequestError):
    """As many requests are open as this gateway allows."""

    status = 429
    kind = "rate_limit_error"
    code = "too_many_requests"
    retry_after_s = QUEUE_RETRY_AFTER_S


class TooManyQueuedError(RequestError):
    """As many requests wait for a rank as allowed."""

    status = 503
    code = "queue_full"
    retry_after_s = QUEUE_RETRY_AFTER_S


class NoRankError(RequestError):
    """No rank took the request in time."""

    status = 503
    code = "pool_unavailable"
    retry_after_s = DOWN_RETRY_AFTER_S


class QueuedTooLongError(RequestError):
    """The request waited too long in a rank's queue; nothing is wrong with the rank."""

    status = 503
    code = "queue_timeout"
    retry_after_s = DOWN_RETRY_AFTER_S


class StoppingError(RequestError):
    """This gateway is stopping; another one may serve the request."""

    status = 503
    code = "gateway_stopping"
    retry_after_s = QUEUE_RETRY_AFTER_S


class AttemptsExhaustedError(RequestError):
    """The request failed on the maximum number of ranks; it may not be the cause."""

    status = 503
    code = "attempts_exhausted"
    retry_after_s = DOWN_RETRY_AFTER_S


class PoisonRequestError(RequestError):
    """Ranks fail when they run this request, so it is not tried on another one.

    The status is not 5xx, because clients retry those on their own.
    """

    status = 422
    kind = "invalid_request_error"
    code = "poison_request"


class ClientGoneError(GatewayError):
    """The client hung up or does not read: the response cannot be sent."""


class RankLostError(GatewayError):
    """A rank did not finish a request; another one may. The message says what happened.

    `blame` is how far the request may be the cause.
    """

    def __init__(self, message: str, *, blame: Blame = Blame.NONE) -> None:
        super().__init__(message)
        self.blame = blame


class RankFullError(GatewayError):
    """A rank's queue is full; nothing is wrong with the rank."""
