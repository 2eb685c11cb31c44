"""Tokens: short-lived proofs of an identity, each valid for one audience only.

A caller signs a token for every call with its own key; a port accepts the matching public keys.
A token names its audience, so its receiver cannot use it elsewhere, and learns no secret from it.
Tokens are JSON Web Tokens (RFC 7519) with Ed25519 signatures (RFC 8037), so that other programs can
make them. Their key ID (`kid`) is the raw public key in base64url.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_private_key

from equipoise.telemetry.logs import printable
from equipoise.trust.errors import InvalidTokenError, TrustError
from equipoise.trust.files import ReloadedFile
from equipoise.trust.identity import Identity, parse_identity

BALANCER = "balancer"
"""Audience of tokens for balancers, which share all their state."""

LIFETIME_S = 60
"""Validity of a token. Only the start of a call is checked, so it covers delays, not calls."""

CLOCK_SKEW_S = 60
"""How far the clocks of two machines may differ."""

MAX_TOKEN_LENGTH = 2048
"""Characters; longer ones are not decoded."""


def worker_audience(pool: str, worker: str) -> str:
    """Audience of tokens for one worker."""
    return f"worker/{quote(pool, safe='')}/{quote(worker, safe='')}"


class SigningKey:
    """The Ed25519 private key in a PEM file, reloaded when the file is replaced.

    Raises:
        TrustError: the file contains no such key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = ReloadedFile("signing_key", path, name="signing key", parse=self._parse)

    def token(self, *, audience: str, now: float) -> str:
        """A token for `audience`; signed with the last valid key while the file is unusable."""
        key = self._file.content()
        header = {"alg": "EdDSA", "typ": "JWT", "kid": _encoded(_raw(key.public_key()))}
        claims = {"aud": audience, "iat": int(now), "exp": int(now) + LIFETIME_S}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (header, claims))
        return f"{signed}.{_encoded(key.sign(signed.encode()))}"

    def _parse(self, text: bytes) -> Ed25519PrivateKey:
        try:
            key = load_pem_private_key(text, password=None)
        except (TypeError, ValueError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise TrustError(
                f"signing_key {self._path} must contain an unencrypted Ed25519 private key in PEM: "
                "make one with `openssl genpkey -algorithm ed25519`"
            )
        return key


class AcceptedKeys:
    """The identity for each accepted public key, from a file that is reloaded when replaced.

    A line is an identity, a space, and the public key: the one line in the PEM file that
    `openssl pkey -pubout` writes. Lines that begin with # are comments.

    Raises:
        TrustError: a line has another form, a key is there twice, or there is no key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = ReloadedFile("accepted_keys", path, name="accepted keys", parse=self._parse)

    def identify(self, token: str, *, audience: str, now: float) -> Identity:
        """The identity that a token proves to `audience` at `now`.

        Raises:
            InvalidTokenError: it proves none; says why.
        """
        accepted = self._file.content()
        header, claims, signed, signature = _parts(token)
        identity = accepted.get(header)
        if identity is None:
            raise InvalidTokenError("its key is not accepted: check whether it was replaced")
        try:
            Ed25519PublicKey.from_public_bytes(header).verify(signature, signed)
        except InvalidSignature:
            raise InvalidTokenError("its signature is invalid") from None
        _check_claims(claims, audience=audience, now=now)
        return identity

    def _parse(self, text: bytes) -> Mapping[bytes, Identity]:
        accepted: dict[bytes, Identity] = {}
        for number, line in enumerate(text.decode(errors="replace").splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            identity = parse_identity(words[0]) if len(words) == 2 else None
            key = _public_key(words[1]) if len(words) == 2 else None
            where = f"accepted_keys {self._path}, line {number}"
            if identity is None or key is None:
                # The message must not contain the line, which may be a private key by mistake.
                raise TrustError(
                    f"{where}: must be an identity (worker/POOL/WORKER, gateway, reader or "
                    "admin/NAME), a space, and the base64 line of an Ed25519 public key in PEM"
                )
            if key in accepted:
                raise TrustError(f"{where}: the key of {accepted[key]} again: use one key for each")
            accepted[key] = identity
        if not accepted:
            raise TrustError(f"accepted_keys {self._path} contains no key: add a line")
        return accepted


def _check_claims(payload: bytes, *, audience: str, now: float) -> None:
    """Check a payload whose signature is valid."""
    claims = _document(payload)
    named, expiry = claims.get("aud"), claims.get("exp")
    if named != audience:
        shown = printable(str(named))[:100]
        raise InvalidTokenError(f"it is for {shown}, but this is {audience}: check both names")
    if type(expiry) is not int:
        raise InvalidTokenError("its expiry is not a whole number")
    if expiry < now - CLOCK_SKEW_S:
        raise InvalidTokenError(f"it expired {now - max(expiry, 0):.0f} s ago: check both clocks")
    if expiry > now + LIFETIME_S + CLOCK_SKEW_S:
        raise InvalidTokenError(
            f"it expires more than {LIFETIME_S} s from now: check both clocks, or sign one per call"
        )


def _parts(token: str) -> tuple[bytes, bytes, bytes, bytes]:
    """Public key, claims, signed bytes and signature of a token, none of them verified."""
    words = token.split(".") if len(token) <= MAX_TOKEN_LENGTH else []
    try:
        header, claims, signature = (_decoded(word) for word in words)
        kid = _decoded(str(_document(header).get("kid")))
    except ValueError:
        raise InvalidTokenError("it is not a signed token: update the client") from None
    return kid, claims, token.rpartition(".")[0].encode(), signature


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise InvalidTokenError("it is not a signed token: update the client")
    return document


def _public_key(text: str) -> bytes | None:
    try:
        key = load_der_public_key(base64.b64decode(text, validate=True))
    except ValueError:
        return None
    return _raw(key) if isinstance(key, Ed25519PublicKey) else None


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes_raw()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
