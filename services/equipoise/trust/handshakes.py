"""TLS handshake failures in the process's own log, by cause.

gRPC has no call for them: its native code writes a line to stderr for each, in its own format.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from equipoise.telemetry.logs import Causes, printable
from equipoise.trust.certificates import EXPLANATIONS
from equipoise.trust.settings import Tls

_MAX_LINE = 65_536
"""Bytes of an unfinished line after which it is passed on in parts."""

_END_S = 1.0
"""Time for the last lines. Only a child process that outlives its parent takes longer."""

_FAILURE = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] "
    rb"(?:Handshake failed with [^:]*: |(?=No match found for server name: ))(.*)"
)
_SERVERS = (
    ("NOT_RETURN_A_CERTIFICATE", "it presented no certificate: set its tls_cert and tls_key"),
    ("HTTP_REQUEST", "it uses HTTP without TLS: set its tls_ca, or another port"),
    ("WRONG_VERSION_NUMBER", "it uses plain text but this process uses TLS: set its tls_ca"),
    (
        "No match found for server name",
        "it expects another name than this process's tls_cert has: set its name of this role",
    ),
    ("UNKNOWN_CA", "it does not trust the authority of this process's tls_cert"),
)
"""What only a server meets, or another remedy than a client's."""

_log = logging.getLogger(__name__)


@contextmanager
def logging_handshakes(tls: Tls) -> Iterator[None]:
    """Inside the block, log handshake failures by cause: the 1st, 2nd, 4th... of each.

    Native code writes to a pipe instead of stderr, and a thread passes on all that is not such a
    line. Enter it before `configure_logs`, whose lines do not take the detour. Nothing is changed
    without certificates, or where GRPC_VERBOSITY or GRPC_TRACE asks for gRPC's own lines.
    """
    if not (tls.tls_ca or tls.serves_tls) or {"GRPC_VERBOSITY", "GRPC_TRACE"} & os.environ.keys():
        yield
        return
    stderr, direct = sys.stderr, os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    sys.stderr = os.fdopen(direct, "w", buffering=1, errors="backslashreplace")
    reader = threading.Thread(
        target=_pass_on, args=(reading, direct), name="native stderr", daemon=True
    )
    reader.start()
    try:
        yield
    finally:
        os.dup2(direct, 2)
        sys.stderr = stderr
        reader.join(_END_S)


def _pass_on(reading: int, stderr: int) -> None:
    causes, rest = Causes(), b""
    while chunk := os.read(reading, _MAX_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE:
            os.write(stderr, rest)
            rest = b""
        for line in lines:
            if failure := _FAILURE.fullmatch(line):
                _report(failure[1].decode(errors="backslashreplace"), causes)
            else:
                os.write(stderr, line + b"\n")
    os.write(stderr, rest)
    os.close(reading)


def _report(details: str, causes: Causes) -> None:
    known = (words for mark, words in (*_SERVERS, *EXPLANATIONS) if mark in details)
    cause = next(known, printable(details))
    if number := causes.count(cause):
        _log.warning("a peer's TLS handshake failed: %s (%d so far)", cause, number)
