"""Signed tokens: for one audience, for a minute, by accepted keys only."""

import base64
import errno
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import InvalidTokenError, TrustError
from equipoise.trust.identity import Identity, Role
from equipoise.trust.tokens import (
    CLOCK_SKEW_S,
    LIFETIME_S,
    AcceptedKeys,
    SigningKey,
    worker_audience,
)
from tests.support.authority import write_key, write_keys

NOW = 1_800_000_000.5
AUDIENCE = worker_audience("tiny", "w-0")


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, "gateway", "admin/ann")


def encoded(part):
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def signed(path, claims, **header):
    """A token with any header and claims, and a valid signature."""
    own = SigningKey(path).token(audience="x", now=NOW).split(".")[0]
    own = json.loads(base64.urlsafe_b64decode(own + "=="))
    key = load_pem_private_key(Path(path).read_bytes(), password=None)
    text = f"{encoded(own | header)}.{encoded(claims)}"
    return f"{text}.{encoded(key.sign(text.encode()))}"


def rejection(keys, token, *, audience=AUDIENCE, now=NOW):
    with pytest.raises(InvalidTokenError) as caught:
        AcceptedKeys(str(keys[1])).identify(token, audience=audience, now=now)
    (line,) = str(caught.value).splitlines()
    assert len(line) < 300
    return line


def test_a_token_proves_an_identity_to_its_audience(keys):
    paths, accepted = keys
    known = AcceptedKeys(str(accepted))
    for who, identity in (
        ("gateway", Identity(role=Role.GATEWAY)),
        ("admin/ann", Identity(role=Role.ADMIN, name="ann")),
    ):
        token = SigningKey(paths[who]).token(audience=AUDIENCE, now=NOW)
        assert known.identify(token, audience=AUDIENCE, now=NOW) == identity


@pytest.mark.parametrize(
    "audience", ["balancer", worker_audience("tiny", "w-1"), worker_audience("other", "w-0"), ""]
)
def test_elsewhere_it_proves_nothing(keys, audience):
    token = SigningKey(keys[0]["gateway"]).token(audience=AUDIENCE, now=NOW)
    line = rejection(keys, token, audience=audience)
    assert line == f"it is for worker/tiny/w-0, but this is {audience}: check both names"


def test_names_with_slashes_are_not_confused():
    assert worker_audience("a/b", "c") != worker_audience("a", "b/c")


def test_it_lasts_a_minute_and_the_clocks_may_differ(keys):
    known = AcceptedKeys(str(keys[1]))
    token = SigningKey(keys[0]["gateway"]).token(audience=AUDIENCE, now=NOW)
    for now in (NOW - CLOCK_SKEW_S, NOW, NOW + LIFETIME_S + CLOCK_SKEW_S - 1):
        known.identify(token, audience=AUDIENCE, now=now)
    late = rejection(keys, token, now=NOW + LIFETIME_S + CLOCK_SKEW_S + 1)
    assert late == "it expired 62 s ago: check both clocks"
    assert "from now: check both clocks" in rejection(keys, token, now=NOW - CLOCK_SKEW_S - 2)


def test_a_key_that_is_not_accepted_proves_nothing(keys, tmp_path):
    stranger, _ = write_key(tmp_path, "stranger")
    token = SigningKey(stranger).token(audience=AUDIENCE, now=NOW)
    assert "its key is not accepted" in rejection(keys, token)
    head, claims, signature = token.split(".")
    own = SigningKey(keys[0]["gateway"]).token(audience=AUDIENCE, now=NOW).split(".")[0]
    assert rejection(keys, f"{own}.{claims}.{signature}") == "its signature is invalid"
    assert "not accepted" in rejection(keys, f"{head}.{claims}.")


def test_no_header_switches_the_check_off(keys):
    path = keys[0]["gateway"]
    good = {"aud": AUDIENCE, "exp": int(NOW) + 1}
    AcceptedKeys(str(keys[1])).identify(signed(path, good), audience=AUDIENCE, now=NOW)
    header, claims, _ = signed(path, good, alg="none").split(".")
    assert rejection(keys, f"{header}.{claims}.") == "its signature is invalid"


@pytest.mark.parametrize(
    "claims",
    [
        *({"aud": AUDIENCE, "exp": exp} for exp in (None, "9", True, 1.5, float("nan"), [1])),
        *({"aud": AUDIENCE, "exp": exp} for exp in (-1, 0, 2**53 + 1, 2**64, 10**300, -(10**400))),
        *({"aud": aud, "exp": int(NOW)} for aud in (None, [AUDIENCE], {}, "a\nb" * 300)),
        *({}, [], "text", None, b"\xff", b"", b"[" * 1200),
    ],
)
def test_hostile_claims_are_rejected_in_one_line(keys, claims):
    rejection(keys, signed(keys[0]["gateway"], claims))


@pytest.mark.parametrize(
    "token", ["", ".", "..", "...", "a.b.c", "a" * 10_000, "\u00e4.\u00e4.\u00e4", "e30.e30.e30"]
)
def test_what_is_not_a_token_is_rejected_in_one_line(keys, token):
    rejection(keys, token)


def test_replaced_files_are_reloaded_and_invalid_ones_are_ignored(keys, tmp_path, caplog):
    paths, accepted = keys
    known, own = AcceptedKeys(str(accepted)), SigningKey(paths["gateway"])
    _, line = write_key(tmp_path, "gateway")
    assert "not accepted" in rejection(keys, own.token(audience=AUDIENCE, now=NOW))
    accepted.write_text(f"# the new key\n\n{line}")
    for text in (line, "nonsense\n"):
        accepted.write_text(text)
        token = own.token(audience=AUDIENCE, now=NOW)
        assert known.identify(token, audience=AUDIENCE, now=NOW).role is Role.GATEWAY
    assert "keeping the last valid accepted keys" in caplog.text


def test_a_file_that_stays_unusable_is_one_warning(keys, caplog):
    accepted = keys[1]
    known = AcceptedKeys(str(accepted))
    accepted.unlink()
    for _ in range(3):
        known.identify(
            SigningKey(keys[0]["gateway"]).token(audience=AUDIENCE, now=NOW),
            audience=AUDIENCE,
            now=NOW,
        )
    assert caplog.text.count("keeping the last valid accepted keys") == 1


def test_a_file_that_could_not_be_opened_is_read_later(keys, monkeypatch):
    """As when this process has too many open files, or before its owner is set."""
    paths, accepted = keys
    known = AcceptedKeys(str(accepted))
    token = SigningKey(paths["gateway"]).token(audience=AUDIENCE, now=NOW)
    text = accepted.read_text()
    accepted.write_text("".join(line for line in text.splitlines(True) if "gateway" not in line))
    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", _no_more_files)
        known.identify(token, audience=AUDIENCE, now=NOW)
    with pytest.raises(InvalidTokenError, match="not accepted"):
        known.identify(token, audience=AUDIENCE, now=NOW)


def _no_more_files(*_, **__):
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_key_of_another_kind_is_an_error(tmp_path):
    path = tmp_path / "key.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    for text in (key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), b"secret"):
        path.write_bytes(text)
        with pytest.raises(TrustError, match="must contain an unencrypted Ed25519 private key"):
            Credentials(signing_key=str(path))


def test_invalid_lines_are_named_without_their_text(tmp_path):
    private, line = write_key(tmp_path, "reader")
    secret = Path(private).read_text().splitlines()[1]
    path = tmp_path / "accepted"
    for text, words in (
        ("", "contains no key"),
        (line.replace("reader", "root"), "line 1: must be an identity"),
        (f"\n{line.strip()} more\n", "line 2: must be an identity"),
        (f"reader {secret}\n", "line 1: must be an identity"),
        (f"{line}admin/ann {line.split()[1]}\n", "line 2: the key of reader again"),
    ):
        path.write_text(text)
        with pytest.raises(TrustError) as caught:
            AcceptedKeys(str(path))
        assert words in str(caught.value)
        assert secret not in str(caught.value)
