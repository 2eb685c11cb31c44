"""A metrics port that uses TLS."""

import asyncio
import logging
import ssl
from functools import partial

import pytest

from equipoise.balancer.settings import BalancerSettings
from equipoise.gateway.settings import GatewaySettings
from equipoise.settings.errors import InvalidSettingsError
from equipoise.telemetry import exposition
from equipoise.telemetry.exposition import MAX_CONNECTIONS, metrics_at
from equipoise.telemetry.metrics_settings import MetricsPort
from equipoise.trust.credentials import Credentials
from equipoise.trust.https import metrics_https
from equipoise.trust.settings import Tls
from equipoise.worker.settings import WorkerSettings
from tests.support.authority import Authority
from tests.support.scrapes import scrape

WAIT_S = 60.0
PORT = MetricsPort(metrics_listen="127.0.0.1:0", metrics_tls=True)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def credentials(authority):
    return Credentials(authority.issue("worker"))


def serving(credentials, port=PORT):
    return metrics_at(port, tls=metrics_https(credentials, port))


async def serial_of(address, ca_file):
    """The serial number of the certificate that a new connection gets."""
    host, _, port = address.rpartition(":")
    trusting = ssl.create_default_context(cafile=ca_file)
    _, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    serial = writer.get_extra_info("peercert")["serialNumber"]
    writer.transport.abort()
    return serial


async def connected(address):
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_scrapers_read_metrics_over_tls_and_need_no_certificate(authority, credentials):
    async with asyncio.timeout(WAIT_S), serving(credentials) as address:
        for _ in range(3):
            assert "equipoise_build_info" in await scrape(address, ca_file=authority.ca_file)


async def test_the_token_is_required_over_tls_too(authority, credentials, tmp_path):
    (tmp_path / "token").write_text("secret")
    port = MetricsPort(
        metrics_listen="127.0.0.1:0", metrics_tls=True, metrics_token_file=str(tmp_path / "token")
    )
    async with asyncio.timeout(WAIT_S), serving(credentials, port) as address:
        families = await scrape(address, ca_file=authority.ca_file, token="secret")
        assert "equipoise_build_info" in families
        with pytest.raises(OSError, match="401"):
            await scrape(address, ca_file=authority.ca_file)


async def test_plain_http_reads_nothing_and_is_logged_by_cause(credentials, caplog):
    async with asyncio.timeout(WAIT_S), serving(credentials) as address:
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                reader, writer = await connected(address)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"equipoise" not in await ended(reader)
                writer.close()
    lines = [one.getMessage() for one in caplog.records if "handshake" in one.getMessage()]
    assert len(lines) == 4, "the 1st, 2nd, 4th and 8th"
    assert "http request" in lines[-1]
    assert lines[-1].endswith("(8 so far)")


async def ended(reader):
    """What is left to read when the peer ends the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_new_connections_get_a_replaced_certificate(authority, credentials, caplog):
    async with asyncio.timeout(WAIT_S), serving(credentials) as address:
        first = await serial_of(address, authority.ca_file)
        tls = authority.issue("worker")
        second = await serial_of(address, authority.ca_file)
        assert second != first
        with open(tls.tls_key, "w") as key:  # noqa: PTH123, ASYNC230
            key.write("broken")
        with caplog.at_level(logging.WARNING):
            assert await serial_of(address, authority.ca_file) == second
        assert "keeping the last valid certificates" in caplog.text


async def test_clients_that_never_make_a_handshake_keep_no_scraper_out(authority, credentials):
    async with asyncio.timeout(WAIT_S), serving(credentials) as address:
        idle = [await connected(address) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(3):
            assert "equipoise_build_info" in await scrape(address, ca_file=authority.ca_file)
        closed = [reader for reader, _ in idle if reader.at_eof() or reader.exception()]
        assert len(idle) - len(closed) <= MAX_CONNECTIONS
        for _, writer in idle:
            writer.close()


async def test_a_handshake_and_a_header_have_one_timeout(authority, credentials, monkeypatch):
    monkeypatch.setattr(exposition, "HEADER_S", 0.3)
    trusting = ssl.create_default_context(cafile=authority.ca_file)
    async with asyncio.timeout(WAIT_S), serving(credentials) as address:
        host, _, port = address.rpartition(":")
        silent, silent_writer = await connected(address)
        slow, slow_writer = await asyncio.open_connection(host, int(port), ssl=trusting)
        slow_writer.write(b"GET /metrics HTTP/1.1\r\nHost:")
        assert await ended(silent) == b""
        assert await ended(slow) == b""
        silent_writer.close()
        slow_writer.close()


@pytest.mark.parametrize(
    "settings",
    [
        BalancerSettings,
        WorkerSettings,
        partial(GatewaySettings, balancer=("127.0.0.1:7070",)),
    ],
    ids=["balancer", "worker", "gateway"],
)
def test_tls_needs_a_certificate(settings, authority):
    settings(metrics=PORT, tls=authority.issue("worker"))
    with pytest.raises(InvalidSettingsError, match="metrics_tls needs a certificate"):
        settings(metrics=PORT, tls=Tls())


@pytest.mark.parametrize("option", [{"metrics_tls": True}, {"metrics_token_file": "token"}])
def test_an_option_of_a_port_that_is_off_is_an_error(option):
    with pytest.raises(InvalidSettingsError, match="set metrics_listen"):
        MetricsPort(**option)


def test_the_page_shares_no_port_with_metrics_over_tls(authority):
    one = "127.0.0.1:9090"
    port = MetricsPort(metrics_listen=one, metrics_tls=True)
    with pytest.raises(InvalidSettingsError, match="the page is served without TLS"):
        BalancerSettings(metrics=port, web_listen=one, tls=authority.issue("balancer"))
