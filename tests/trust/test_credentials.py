"""Certificate files: errors are one line, and replaced files are reloaded."""

import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from equipoise.trust.credentials import Credentials
from equipoise.trust.errors import TrustError
from equipoise.trust.settings import Tls
from tests.support.authority import Authority


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def rejection(tls):
    with pytest.raises(TrustError) as caught:
        Credentials(tls)
    (line,) = str(caught.value).splitlines()
    return line


def test_matching_files_are_accepted(authority):
    Credentials(authority.issue("balancer"))
    Credentials(Tls())


def test_a_missing_file_is_named_with_its_setting(authority):
    tls = authority.issue("balancer")
    Path(tls.tls_cert).unlink()
    assert rejection(tls) == f"tls_cert {tls.tls_cert}: No such file or directory"


def test_a_file_without_a_certificate_is_named(authority):
    tls = authority.issue("balancer")
    authority.ca_file.write_text("-----BEGIN nothing")
    assert rejection(tls) == f"tls_ca {authority.ca_file} contains no PEM certificate"


def test_an_expired_certificate_is_named_with_its_date(authority):
    tls = authority.issue("balancer", expired=True)
    assert rejection(tls) == f"tls_cert {tls.tls_cert} expired on 2020-02-01: renew it"


def test_a_key_of_another_certificate_is_an_error(authority):
    one, other = authority.issue("one"), authority.issue("other")
    mixed = Tls(tls_ca=one.tls_ca, tls_cert=one.tls_cert, tls_key=other.tls_key)
    assert rejection(mixed) == f"tls_key {other.tls_key} is not the key of tls_cert {one.tls_cert}"


def test_an_invalid_key_is_named(authority):
    tls = authority.issue("one")
    Path(tls.tls_key).write_text("secret")
    assert "contains no unencrypted PEM private key" in rejection(tls)


def test_a_certificate_of_another_authority_is_an_error(authority, tmp_path):
    other = Authority(tmp_path / "other").issue("balancer")
    mixed = Tls(tls_ca=str(authority.ca_file), tls_cert=other.tls_cert, tls_key=other.tls_key)
    assert "is not signed by the authority in tls_ca" in rejection(mixed)


def test_renewed_files_are_reloaded_and_invalid_ones_are_ignored(authority, caplog):
    tls = authority.issue("balancer")
    credentials = Credentials(tls)
    assert credentials.version() == 1
    authority.issue("balancer")
    assert credentials.version() == 2
    Path(tls.tls_cert).write_text("half a file")
    assert credentials.version() == 2
    assert "keeping the last valid certificates: tls_cert" in caplog.text
    authority.issue("balancer")
    assert credentials.version() == 3


async def test_a_port_presents_renewed_certificates_whoever_noticed_them_first(authority):
    tls = authority.issue("balancer")
    credentials = Credentials(tls)
    server = grpc.aio.server()
    port = credentials.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        for _ in range(2):
            assert await asyncio.to_thread(_presented, port, tls) == _in_file(tls)
            authority.issue("balancer")
            credentials.expires_s()  # As a scrape of the metrics does.
        assert await asyncio.to_thread(_presented, port, tls) == _in_file(tls)
    finally:
        await server.stop(None)


def _presented(port, tls):
    """The certificate that a port shows to a caller with these files."""
    context = ssl.create_default_context(cafile=tls.tls_ca)
    context.load_cert_chain(tls.tls_cert, tls.tls_key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert(binary_form=True)


def _in_file(tls):
    return ssl.PEM_cert_to_DER_cert(Path(tls.tls_cert).read_text())


@pytest.mark.parametrize(("ahead_s", "is_taken"), [(30, True), (3600, False)])
def test_the_clock_may_be_a_little_behind_that_of_the_authority(authority, ahead_s, is_taken):
    credentials = Credentials(authority.issue("balancer"))
    authority.issue("balancer", begins=datetime.now(UTC) + timedelta(seconds=ahead_s))
    assert credentials.version() == 1 + is_taken


@pytest.mark.parametrize(("worker", "balancer"), [("", "b"), ("w", ""), ("same", "same")])
def test_names_that_do_not_distinguish_roles_are_an_error(authority, worker, balancer):
    with pytest.raises(TrustError, match="must be set and differ"):
        Credentials(authority.issue("reader"), worker_name=worker, balancer_name=balancer)


def test_a_peers_details_are_escaped_and_bounded():
    explained = Credentials().explain("no\nroom\x00\u2028\u202e" + "x" * 10_000)
    assert explained.startswith(r"no\nroom\x00\u2028\u202e")
    assert explained.isprintable()
    assert len(explained) <= 1000
