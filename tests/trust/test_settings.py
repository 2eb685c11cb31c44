"""Where plain text is allowed, and which options go together."""

import pytest

from equipoise.trust.errors import TrustError
from equipoise.trust.settings import Tls, is_loopback


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"])
def test_plain_text_is_allowed_on_loopback(address):
    assert is_loopback(address)
    Tls().check_listen(address)
    Tls().check_dial(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "balancer:7070"])
def test_other_machines_require_certificates_or_insecure(address):
    assert not is_loopback(address)
    with pytest.raises(TrustError, match="--tls-cert and --tls-key, or --insecure"):
        Tls().check_listen(address)
    with pytest.raises(TrustError, match="add --tls-ca to use TLS, or --insecure"):
        Tls().check_dial(address)
    for tls in (Tls(insecure=True), Tls(tls_ca="a", tls_cert="c", tls_key="k")):
        tls.check_listen(address)
        tls.check_dial(address)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_cert": "c"}, "tls_cert and tls_key go together"),
        ({"tls_key": "k"}, "tls_cert and tls_key go together"),
        ({"tls_ca": "a", "insecure": True}, "insecure means plain text"),
    ],
)
def test_contradicting_settings_are_rejected(settings, words):
    with pytest.raises(TrustError, match=words):
        Tls(**settings)


def test_a_port_needs_a_certificate_in_addition_to_the_authority():
    with pytest.raises(TrustError, match="tls_ca also needs tls_cert and tls_key"):
        Tls(tls_ca="a").check_listen("127.0.0.1:1")
