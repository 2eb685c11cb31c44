"""Failed TLS handshakes in the process's own log."""

import json
import os
import socket
import ssl
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.authority import Authority

SERVER = """
import asyncio, os, sys, grpc
from equipoise.telemetry.logs import LogFormat, configure_logs
from equipoise.trust.credentials import Credentials
from equipoise.trust.handshakes import logging_handshakes
from equipoise.trust.settings import Tls

async def serve(tls):
    server = grpc.aio.server()
    port = Credentials(tls).bind(server, "127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)

tls = Tls(tls_ca=sys.argv[1], tls_cert=sys.argv[2], tls_key=sys.argv[3])
with logging_handshakes(tls):
    configure_logs(LogFormat.JSON)
    os.write(2, b"words of native code\\n")
    asyncio.run(serve(tls))
    os.write(2, b"without an end")
os.write(2, b" of the line\\n")
"""


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "ours")


def _stderr_of(tls, callers, **environment):
    """What a server with this `tls` writes to stderr while `callers` call its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, tls.tls_ca, tls.tls_cert, tls.tls_key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        port = int(process.stdout.readline())
        for call in callers:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                call(connection)
        return process.communicate("", timeout=60)[1].splitlines()
    finally:
        process.kill()


def _handshake(tls=None, *, name=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if tls is not None:
        context.load_cert_chain(tls.tls_cert, tls.tls_key)

    def call(connection):
        with suppress(OSError), context.wrap_socket(connection, server_hostname=name) as wrapped:
            wrapped.recv(1)

    return call


def _plain(connection):
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    connection.recv(1)


def test_failures_are_logged_by_cause_and_rarely(authority, tmp_path):
    expired = authority.issue("worker/old", expired=True)
    other = Authority(tmp_path / "theirs").issue("worker/other")
    valid = authority.issue("admin/ann")
    named = [_handshake(valid, name=f"name-{number}.example") for number in range(3)]
    callers = [_handshake(expired), _handshake(other), _plain, *[_handshake()] * 5, *named]
    lines = _stderr_of(authority.issue("balancer"), callers)
    assert lines[0] == "words of native code"
    assert lines[-1] == "without an end of the line"
    logged = [json.loads(line) for line in lines[1:-1]]
    assert {line["level"] for line in logged} == {"warning"}
    start = "a peer's TLS handshake failed: "
    assert [line["message"].removeprefix(start) for line in logged] == [
        "its certificate has expired: renew it (1 so far)",
        "its certificate is not signed by this process's tls_ca (1 so far)",
        "it uses HTTP without TLS: set its tls_ca, or another port (1 so far)",
        *[
            f"it presented no certificate: set its tls_cert and tls_key ({number} so far)"
            for number in (1, 2, 4)
        ],
        *[
            "it expects another name than this process's tls_cert has: set its name of this role "
            f"({number} so far)"
            for number in (1, 2)
        ],
    ]


def test_the_lines_of_grpc_are_left_to_those_who_ask_for_them(authority):
    lines = _stderr_of(authority.issue("balancer"), [_plain], GRPC_VERBOSITY="INFO")
    assert any("ssl_transport_security" in line for line in lines)
