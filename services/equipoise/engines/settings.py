"""`EngineSettings`: the settings of a plugin, from environment variables only."""

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

_MAX_NAME = 240
"""Length of a name that leaves room for a rank."""

_OPTION = re.compile(r"(?:--|\b(?=tls_))([a-z_-]+)")


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
        InvalidSettingsError: an address is invalid.
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
        for address in self.balancer.split(","):
            dial_address("EQUIPOISE_BALANCER", address)
            self.tls.check_dial(address)
        listen_address("EQUIPOISE_LISTEN", self.listen)
        self.tls.check_listen(self.listen)


def settings_from(environment: Mapping[str, str] = os.environ) -> EngineSettings | None:
    """Return the settings, or None if neither a balancer nor a pool is named.

    Raises:
        UnsupportedEngineError: a variable is missing or invalid.
    """
    balancer, pool = environment.get("EQUIPOISE_BALANCER"), environment.get("EQUIPOISE_POOL")
    if not balancer and not pool:
        return None
    if not balancer or not pool:
        raise UnsupportedEngineError("set both EQUIPOISE_BALANCER and EQUIPOISE_POOL, or neither")
    host = socket.gethostname()
    worker = environment.get("EQUIPOISE_WORKER", host)
    if not (worker.isascii() and worker.isprintable() and 0 < len(worker) <= _MAX_NAME):
        raise UnsupportedEngineError(
            f"EQUIPOISE_WORKER is {worker!r}: set it to 1 to {_MAX_NAME} printable ASCII characters"
        )
    mode = environment.get("EQUIPOISE_MODE", Mode.BALANCE)
    if mode not in list(Mode):
        raise UnsupportedEngineError(f"EQUIPOISE_MODE is {mode!r}: set it to {' or '.join(Mode)}")
    try:
        return EngineSettings(
            balancer=balancer,
            pool=pool,
            worker=worker,
            node=environment.get("EQUIPOISE_NODE", host),
            advertise_host=environment.get("EQUIPOISE_ADVERTISE_HOST", host),
            listen=environment.get("EQUIPOISE_LISTEN", "0.0.0.0:0"),
            mode=Mode(mode),
            tls=Tls(
                tls_ca=environment.get("EQUIPOISE_TLS_CA", ""),
                tls_cert=environment.get("EQUIPOISE_TLS_CERT", ""),
                tls_key=environment.get("EQUIPOISE_TLS_KEY", ""),
                tls_trust_domain=environment.get("EQUIPOISE_TLS_TRUST_DOMAIN", TRUST_DOMAIN),
                insecure=environment.get("EQUIPOISE_INSECURE", "") in {"1", "true"},
            ),
            tls_worker_name=environment.get("EQUIPOISE_TLS_WORKER_NAME", WORKER_NAME),
            tls_balancer_name=environment.get("EQUIPOISE_TLS_BALANCER_NAME", BALANCER_NAME),
            signing_key=environment.get("EQUIPOISE_SIGNING_KEY", ""),
            accepted_keys=environment.get("EQUIPOISE_ACCEPTED_KEYS", ""),
        )
    except (InvalidSettingsError, TrustError) as error:
        raise UnsupportedEngineError(_with_variables(str(error))) from error


def _with_variables(text: str) -> str:
    """Name the variables in place of the options of commands, which an engine does not have."""
    return _OPTION.sub(lambda option: "EQUIPOISE_" + option[1].upper().replace("-", "_"), text)
