"""`ScrapeToken`: the bearer token that scrapers of a metrics port must present."""

import hmac
from contextlib import suppress
from pathlib import Path

from equipoise.telemetry.errors import TelemetryError

_SCHEME = "bearer "


class ScrapeToken:
    """The token in a file, read for every request, so that it can be replaced.

    While the file cannot be read, the last token stays valid.

    Raises:
        TelemetryError: the file cannot be read, or is empty.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        try:
            self._token = self._read()
        except OSError as error:
            raise TelemetryError(f"metrics_token_file cannot be read: {error}") from error
        if not self._token:
            raise TelemetryError(f"metrics_token_file {file} is empty: write a token to it")

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header presents the token."""
        with suppress(OSError):
            self._token = self._read() or self._token
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        presented = authorization[len(_SCHEME) :].strip().encode()
        return is_bearer and hmac.compare_digest(presented, self._token)

    def _read(self) -> bytes:
        return self._file.read_bytes().strip()
