"""Roles and identities of callers: `worker/POOL/WORKER`, `gateway`, `reader`, `admin/NAME`.

Pure. The same notation is used in token files, in a certificate's common name, and at the end of
its URI: `spiffe://TRUST_DOMAIN/equipoise/worker/POOL/WORKER`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

ANY = "*"
_SCHEME = "spiffe://"
_URI_MARK = "/equipoise/"


class Role(StrEnum):
    """What a caller is to a fleet."""

    WORKER = "worker"
    """A rank of a pool: connects to the balancer and pulls experts from its peers."""

    GATEWAY = "gateway"
    """Reads the list of ranks and sends them inference requests."""

    READER = "reader"
    """Reads status, loads, layouts and decisions."""

    ADMIN = "admin"
    """Reads everything and sends requests such as pause or rebalance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one credential, a certificate or a token, says about a caller."""

    role: Role
    """What the caller is to the fleet."""

    name: str = ""
    """Distinguishes callers of one role, for the audit; may be empty. Not for workers."""

    pool: str = ANY
    """A worker's pool, or `*` for any."""

    worker: str = ANY
    """A worker's name, or `*` for any."""

    def __str__(self) -> str:
        if self.role is Role.WORKER:
            return f"{self.role}/{self.pool}/{self.worker}"
        return f"{self.role}/{self.name}" if self.name else str(self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The other end of a call. Each of its identities must allow what it does.

    A caller without identities is anonymous and may call ports that require no credentials.
    """

    peer: str
    """Network address, as gRPC writes it."""

    identities: tuple[Identity, ...] = ()
    """One for each credential that the port requires."""

    def __str__(self) -> str:
        if not self.identities:
            return f"anonymous at {self.peer}"
        # A token and a certificate usually have the same identity.
        return " as ".join(dict.fromkeys(map(str, self.identities))) + f" at {self.peer}"

    def may(self, roles: Iterable[Role]) -> bool:
        """Whether each identity has one of these roles."""
        allowed = frozenset(roles)
        return all(identity.role in allowed for identity in self.identities)

    def may_speak_for(self, *, pool: str, worker: str | None = None) -> bool:
        """Whether a worker is the named one of `pool`, or any worker of `pool` without a name.

        True for callers that are not workers.
        """
        return all(
            identity.pool in {pool, ANY} and (worker is None or identity.worker in {worker, ANY})
            for identity in self.identities
            if identity.role is Role.WORKER
        )

    @property
    def pool(self) -> str:
        """The only pool that a credential lets it speak for; empty if there is no such limit."""
        pools = (one.pool for one in self.identities if one.role is Role.WORKER)
        return next((pool for pool in pools if pool != ANY), "")

    @property
    def sender(self) -> str:
        """What tells callers apart: the worker that a credential names, else the machine.

        Connections do not: a caller may have many. Workers that share an identity, or have none,
        are told apart by their machines.
        """
        for one in self.identities:
            if one.role is Role.WORKER and ANY not in {one.pool, one.worker}:
                return str(one)
        return self.peer.rpartition(":")[0]

    def is_worker(self, *, pool: str, worker: str) -> bool:
        """Whether a credential names exactly this worker, not any worker of its pool."""
        return any(
            identity.role is Role.WORKER and (identity.pool, identity.worker) == (pool, worker)
            for identity in self.identities
            if ANY not in {identity.pool, identity.worker}
        )


def parse_identity(text: str) -> Identity | None:
    """Parse `worker/POOL/WORKER`, `gateway`, `reader` or `admin`; None if it names no role.

    All roles but a worker's may be followed by a name. Names are percent-decoded, because they may
    contain slashes; only a literal `*` means any.
    """
    role, *names = text.split("/")
    if role not in set(Role) or not all(names):
        return None
    decoded = [unquote(name) for name in names]
    if role != Role.WORKER:
        return Identity(role=Role(role), name="".join(decoded)) if len(names) < 2 else None
    if len(names) != 2 or decoded.count(ANY) != names.count(ANY):
        return None
    return Identity(role=Role.WORKER, pool=decoded[0], worker=decoded[1])


def certified(
    *, common_name: str, alternative_names: Iterable[str], trust_domain: str
) -> Identity | None:
    """The identity in a certificate: in its first spiffe URI, else its common name.

    A certificate whose first spiffe URI is not `spiffe://TRUST_DOMAIN/equipoise/...` has none:
    others than this fleet gave it its name. URIs of other schemes name no one.
    """
    for name in alternative_names:
        if name.startswith(_SCHEME):
            ours = f"{_SCHEME}{trust_domain}{_URI_MARK}"
            return parse_identity(name.removeprefix(ours)) if name.startswith(ours) else None
    return parse_identity(common_name)
