"""Bearer tokens: the one that we show, and those that we accept. Both are files that may change."""

import hashlib
import hmac
import logging
from collections.abc import Mapping

from equipoise.trust.errors import TrustError
from equipoise.trust.files import WatchedFiles
from equipoise.trust.identity import Identity, parse_identity

MIN_TOKEN_LENGTH = 16
"""A shorter one could be guessed."""

_log = logging.getLogger(__name__)


class OwnToken:
    """The token in a file, read again when it was replaced.

    Raises:
        TrustError: there is no token in the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = WatchedFiles((("token_file", path),))
        self._token = self._read()

    def value(self) -> str:
        """The token now; a file that is being replaced leaves the last one."""
        if self._files.changed():
            try:
                self._token = self._read()
            except TrustError as error:
                _log.warning("the token read last is used on: %s", error)
        return self._token

    def _read(self) -> str:
        (text,) = self._files.read()
        token = text.decode(errors="replace").strip()
        if not is_token(token):
            raise TrustError(
                f"token_file {self._path} must hold one line of at least {MIN_TOKEN_LENGTH} "
                "letters, digits or -._~+/="
            )
        return token


class AcceptedTokens:
    """Who comes with which token, by a file that is read again when it was replaced.

    A line is an identity, a space and a token, or `sha256:` and the token's hash in hexadecimal;
    lines that begin with # say nothing.

    Raises:
        TrustError: a line says neither.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = WatchedFiles((("tokens", path),))
        self._identity_of_hash = self._read()

    def find(self, token: str) -> Identity | None:
        """Whose token it is; a file that makes no sense leaves what was read last."""
        if self._files.changed():
            try:
                self._identity_of_hash = self._read()
                _log.info("the accepted tokens were read again")
            except TrustError as error:
                _log.warning("the tokens read last are accepted on: %s", error)
        presented = hashlib.sha256(token.encode()).digest()
        found = None
        for known, identity in self._identity_of_hash.items():
            # All of them, in constant time, so that an answer's delay tells nothing.
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
                # The token itself must not appear in a log.
                raise TrustError(
                    f"tokens {self._path}, line {number}: wanted is `worker/POOL/WORKER TOKEN`, "
                    "or gateway, reader or admin/NAME in place of the worker, with a token of at "
                    f"least {MIN_TOKEN_LENGTH} letters, digits or -._~+/="
                )
            identities[digest] = identity
        if not identities:
            raise TrustError(f"tokens {self._path} accepts nobody: add a line")
        return identities


def is_token(text: str) -> bool:
    """Whether it can stand in a header and is not short."""
    return len(text) >= MIN_TOKEN_LENGTH and all(
        character.isascii() and (character.isalnum() or character in "-._~+/=")
        for character in text
    )


def _digest(word: str) -> bytes | None:
    if word.startswith("sha256:"):
        try:
            digest = bytes.fromhex(word.removeprefix("sha256:"))
        except ValueError:
            return None
        return digest if len(digest) == hashlib.sha256().digest_size else None
    return hashlib.sha256(word.encode()).digest() if is_token(word) else None
