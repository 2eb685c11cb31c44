"""`ApiKeys`: who may ask, by a file of keys. Owns reading it, and comparing without telling time.

Keys are kept as digests only. The file is read again when it changes, so that keys come and go
without a restart; while it cannot be read, the keys known last count.
"""

import hashlib
import hmac
import logging
from pathlib import Path

from equipoise.gateway.errors import GatewayError, UnauthorizedError

_log = logging.getLogger(__name__)

_Version = tuple[int, int, int]


class ApiKeys:
    """The keys of a file: one a line, empty lines and those that begin with # left out.

    Raises:
        GatewayError: the file cannot be read, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._version = self._look()
            self._digests = _read(path)
        except (OSError, ValueError) as error:
            raise GatewayError(f"api_keys: {_words(path, error)}") from None

    def check(self, authorization: str | None) -> None:
        """See that a request's Authorization header has one of the keys.

        Raises:
            UnauthorizedError: it has not.
        """
        self._read_again()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("send an API key: Authorization: Bearer <key>")
        digest = _digest(key.strip())
        # All are compared, whichever fits.
        if not sum(hmac.compare_digest(digest, one) for one in self._digests):
            raise UnauthorizedError("this API key is not known here")

    def _read_again(self) -> None:
        try:
            version = self._look()
            if version != self._version:
                self._version, self._digests = version, _read(self._path)
                _log.info("%s: %d API keys", self._path, len(self._digests))
        except (OSError, ValueError) as error:
            if self._version != (0, 0, 0):
                _log.warning("%s; the keys known last count", _words(self._path, error))
            self._version = (0, 0, 0)

    def _look(self) -> _Version:
        found = self._path.stat()
        return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read(path: Path) -> tuple[bytes, ...]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError("it has no key")
    return tuple(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()


def _words(path: Path, error: OSError | ValueError) -> str:
    return f"{path}: {error.strerror if isinstance(error, OSError) else error}"
