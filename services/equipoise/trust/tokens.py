"""Bearer tokens: the one this process sends, and those it accepts. Both files are reloadable."""

import hashlib
import hmac
import logging
from collections.abc import Mapping

from equipoise.trust.errors import TrustError
from equipoise.trust.files import WatchedFiles
from equipoise.trust.identity import Identity, parse_identity

MIN_TOKEN_LENGTH = 16
"""Characters; a shorter token could be guessed."""

_log = logging.getLogger(__name__)


class OwnToken:
    """The token in a file, reloaded when the file is replaced.

    Raises:
        TrustError: the file contains no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = WatchedFiles((("token_file", path),))
        self._token = self._read()

    def value(self) -> str:
        """The current token; the last valid one while the file is unusable."""
        if self._files.changed():
            try:
                self._token = self._read()
            except TrustError as error:
                _log.warning("keeping the last valid token: %s", error)
        return self._token

    def _read(self) -> str:
        (text,) = self._files.read()
        token = text.decode(errors="replace").strip()
        if not is_token(token):
            raise TrustError(
                f"token_file {self._path} must contain one line of at least "
                f"{MIN_TOKEN_LENGTH} letters, digits or -._~+/="
            )
        return token


class AcceptedTokens:
    """The identity for each accepted token, from a file that is reloaded when it is replaced.

    A line is an identity, a space, and either a token or `sha256:` with the token's hash in
    hexadecimal. Lines that begin with # are comments.

    Raises:
        TrustError: a line has another form, or there is no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = WatchedFiles((("tokens", path),))
        self._identity_of_hash = self._read()

    def find(self, token: str) -> Identity | None:
        """The identity of a token; None if it is not accepted. An invalid file changes nothing."""
        if self._files.changed():
            try:
                self._identity_of_hash = self._read()
                _log.info("reloaded the accepted tokens")
            except TrustError as error:
                _log.warning("keeping the last valid tokens: %s", error)
        presented = hashlib.sha256(token.encode()).digest()
        found = None
        for known, identity in self._identity_of_hash.items():
            # Compare all of them in constant time, so that the delay reveals nothing.
            if hmac.compare_digest(known, presented):
                found = identity
        return found

    def _read(self) -> Mapping[bytes, Identity]:
        (text,) = self._files.read()
        identities = {}
        for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            identity = parse_identity(words[0]) if len(words) == 2 else None
            digest = _digest(words[1]) if len(words) == 2 else None
            if identity is None or digest is None:
                # The message must not contain the token, because it is logged.
                raise TrustError(
                    f"tokens {self._path}, line {number}: must be an identity (worker/POOL/WORKER, "
                    "gateway, reader or admin/NAME), a space, and a token of at least "
                    f"{MIN_TOKEN_LENGTH} letters, digits or -._~+/="
                )
            identities[digest] = identity
        if not identities:
            raise TrustError(f"tokens {self._path} contains no token: add a line")
        return identities


def is_token(text: str) -> bool:
    """Whether a text is long enough for a token and valid in a header."""
    return len(text) >= MIN_TOKEN_LENGTH and all(
        character.isascii() and (character.isalnum() or character in "-._~+/=")
        for character in text
    )


def _digest(text: str) -> bytes | None:
    if text.startswith("sha256:"):
        try:
            digest = bytes.fromhex(text.removeprefix("sha256:"))
        except ValueError:
            return None
        return digest if len(digest) == hashlib.sha256().digest_size else None
    return hashlib.sha256(text.encode()).digest() if is_token(text) else None
