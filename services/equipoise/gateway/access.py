"""`ApiKeys`: the API keys that clients may use, from a file that is reloaded when it changes."""

import hashlib
import hmac
from pathlib import Path

from equipoise.gateway.errors import GatewayError, UnauthorizedError
from equipoise.trust.errors import TrustError
from equipoise.trust.files import ReloadedFile


class ApiKeys:
    """The keys of a file, one per line; empty lines and lines that begin with # do not count.

    Keeps digests only. While the file cannot be read, the last valid keys count.

    Raises:
        GatewayError: the file cannot be read, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = ReloadedFile("api_keys", str(path), name="API keys", parse=self._parse)
        except TrustError as error:
            raise GatewayError(str(error)) from None

    def check(self, authorization: str | None) -> None:
        """Check a request's Authorization header.

        Raises:
            UnauthorizedError: it has none of the keys.
        """
        digests = self._file.content()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("send an API key: Authorization: Bearer <key>")
        digest = _digest(key.strip())
        # Compare all of them in constant time, so that the delay reveals nothing.
        if not sum(hmac.compare_digest(digest, one) for one in digests):
            raise UnauthorizedError("unknown API key")

    def _parse(self, data: bytes) -> tuple[bytes, ...]:
        lines = (line.strip() for line in data.decode(errors="replace").splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise TrustError(f"api_keys {self._path} contains no key: add a line")
        return tuple(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
