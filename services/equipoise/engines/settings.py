"""`EngineSettings`: the settings of a plugin, from environment variables only."""

import difflib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from equipoise.engines.errors import UnsupportedEngineError
from equipoise.settings.address import dial_address, listen_address
from equipoise.settings.errors import InvalidSettingsError
from equipoise.trust.errors import TrustError
from equipoise.trust.settings import BALANCER_NAME, TRUST_DOMAIN, WORKER_NAME, Tls

_PREFIX = "EQUIPOISE_"

VARIABLES = frozenset(
    {
        *("BALANCER", "POOL", "MODE", "WORKER", "NODE", "ADVERTISE_HOST", "LISTEN"),
        *("TLS_CA", "TLS_CERT", "TLS_KEY", "INSECURE", "TLS_TRUST_DOMAIN"),
        *("TLS_BALANCER_NAME", "TLS_WORKER_NAME", "SIGNING_KEY", "ACCEPTED_KEYS"),
    }
)
"""The variables that the plugin reads, each after `EQUIPOISE_`."""

_MAX_NAME = 240
"""Bytes of a name that leave room for a rank."""

_OPTION = re.compile(r"(?<![\w./-])(?:--|(?=tls_|signing_key|accepted_keys|insecure\b))([a-z_-]+)")
"""What other commands call a setting; not a part of a path."""

_YES, _NO = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}

_LIKENESS = 0.8
"""Of the names of two variables, from which one is taken for a misspelling of the other."""


class Mode(StrEnum):
    """What the plugin does."""

    BALANCE = "balance"
    """Report loads and switch to the balancer's layouts."""

    OBSERVE = "observe"
    """Report loads, and reject every layout: plans are previewed only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the plugin of one engine process.

    Raises:
        InvalidSettingsError: an address or a name is missing or invalid.
        TrustError: the certificate options contradict each other.
    """

    balancer: str
    """host:port of the balancers, comma-separated: EQUIPOISE_BALANCER."""

    pool: str
    """Pool to join: EQUIPOISE_POOL, followed by "-stage" and a number in a pipeline."""

    worker: str
    """Prefix of the ranks' names; each appends "-" and its rank: EQUIPOISE_WORKER, or the host."""

    node: str
    """Domain of fast interconnect: EQUIPOISE_NODE, or the host."""

    advertise_host: str
    """Host under which peers reach this process: EQUIPOISE_ADVERTISE_HOST, or the host."""

    listen: str
    """host:port for peers: EQUIPOISE_LISTEN, or any free port. With several ranks on a host, only
    port 0 works for all."""

    mode: Mode
    """What the plugin does: EQUIPOISE_MODE."""

    tls: Tls
    """Certificates: EQUIPOISE_TLS_CA, EQUIPOISE_TLS_CERT, EQUIPOISE_TLS_KEY and
    EQUIPOISE_TLS_TRUST_DOMAIN, or EQUIPOISE_INSECURE=1."""

    tls_worker_name: str = WORKER_NAME
    """DNS name in the certificates of workers: EQUIPOISE_TLS_WORKER_NAME."""

    tls_balancer_name: str = BALANCER_NAME
    """DNS name in the certificates of balancers: EQUIPOISE_TLS_BALANCER_NAME."""

    signing_key: str = ""
    """PEM file of the key that signs this process's tokens: EQUIPOISE_SIGNING_KEY."""

    accepted_keys: str = ""
    """File of the keys whose tokens peers present: EQUIPOISE_ACCEPTED_KEYS."""

    def worker_of(self, rank: int) -> str:
        """Return the name of a rank's worker."""
        return f"{self.worker}-{rank}"

    def of_stage(self, stage: int, stages: int) -> Self:
        """Return the settings of a pipeline stage, from 0: in a pipeline, each has its own pool."""
        return replace(self, pool=f"{self.pool}-stage{stage}") if stages > 1 else self

    def __post_init__(self) -> None:
        if not self.balancer or not self.pool:
            raise InvalidSettingsError("set both EQUIPOISE_BALANCER and EQUIPOISE_POOL, or neither")
        name = self.worker
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= _MAX_NAME):
            raise InvalidSettingsError(
                f"EQUIPOISE_WORKER is {name!r}: set it to 1 to {_MAX_NAME} printable characters of "
                "ASCII"
            )
        for variable, name in (("EQUIPOISE_POOL", self.pool), ("EQUIPOISE_NODE", self.node)):
            is_shown = name.isprintable() and name.strip()
            if not is_shown or len(name.encode()) > _MAX_NAME:
                raise InvalidSettingsError(
                    f"{variable} is {name!r}: set it to 1 to {_MAX_NAME} bytes of printable "
                    "characters"
                )
        self._check_host()
        for address in self.balancer.split(","):
            dial_address("EQUIPOISE_BALANCER", address)
            self.tls.check_dial(address)
        listen_address("EQUIPOISE_LISTEN", self.listen)
        self.tls.check_listen(self.listen)

    def _check_host(self) -> None:
        host = self.advertise_host
        is_host = host.startswith("[") or ":" not in host
        try:
            dial_address("EQUIPOISE_ADVERTISE_HOST", f"{host}:1")
        except InvalidSettingsError:
            is_host = False
        if not is_host:
            raise InvalidSettingsError(
                f"EQUIPOISE_ADVERTISE_HOST is {host!r}: set it to a host name or an IP address, "
                "an IPv6 one in brackets, without a port"
            )


def settings_from(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Return the settings; an empty variable is like one that is not set.

    Raises:
        UnsupportedEngineError: a variable is missing, invalid or misspelt.
    """
    for variable in environment:
        _check_spelling(variable)

    def value(name: str, default: str = "") -> str:
        return environment.get(_PREFIX + name) or default

    host = socket.gethostname()
    insecure, mode = value("INSECURE"), value("MODE", Mode.BALANCE)
    if insecure.lower() not in _YES | _NO:
        raise UnsupportedEngineError(f"EQUIPOISE_INSECURE is {insecure!r}: set it to 1 or unset it")
    if mode not in list(Mode):
        raise UnsupportedEngineError(f"EQUIPOISE_MODE is {mode!r}: set it to {' or '.join(Mode)}")
    try:
        return EngineSettings(
            balancer=value("BALANCER"),
            pool=value("POOL"),
            worker=value("WORKER", host),
            node=value("NODE", host),
            advertise_host=value("ADVERTISE_HOST", host),
            listen=value("LISTEN", "0.0.0.0:0"),
            mode=Mode(mode),
            tls=Tls(
                tls_ca=value("TLS_CA"),
                tls_cert=value("TLS_CERT"),
                tls_key=value("TLS_KEY"),
                tls_trust_domain=value("TLS_TRUST_DOMAIN", TRUST_DOMAIN),
                insecure=insecure.lower() in _YES,
            ),
            tls_worker_name=value("TLS_WORKER_NAME", WORKER_NAME),
            tls_balancer_name=value("TLS_BALANCER_NAME", BALANCER_NAME),
            signing_key=value("SIGNING_KEY"),
            accepted_keys=value("ACCEPTED_KEYS"),
        )
    except (InvalidSettingsError, TrustError) as error:
        raise UnsupportedEngineError(with_variables(str(error))) from error


def _check_spelling(variable: str) -> None:
    """Reject what looks like a misspelt variable, which would have no effect."""
    prefix, _, name = variable.partition(_PREFIX)
    if prefix or not name or name in VARIABLES:
        return
    for meant in difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_LIKENESS):
        raise UnsupportedEngineError(f"{variable} has no effect: did you mean {_PREFIX}{meant}?")


def with_variables(text: str) -> str:
    """Name the variables in place of the options of commands, which an engine does not have."""

    def variable(option: re.Match[str]) -> str:
        is_flag = option[0] == "--insecure"
        return _PREFIX + option[1].upper().replace("-", "_") + "=1" * is_flag

    return _OPTION.sub(variable, text)
