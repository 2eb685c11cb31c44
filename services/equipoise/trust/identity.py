"""Roles, and who a caller is: `worker/POOL/WORKER`, `gateway`, `reader`, `admin`.

Pure. The same words stand in token files, as a certificate's common name, and at the end of its
URI: `spiffe://any.domain/equipoise/worker/POOL/WORKER`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

ANY = "*"
_URI_MARK = "/equipoise/"


class Role(StrEnum):
    """What somebody is to a fleet."""

    WORKER = "worker"
    """A rank of a pool: reports to the balancer, pulls experts from its peers."""

    GATEWAY = "gateway"
    """Reads who the ranks are and has them generate."""

    READER = "reader"
    """Reads status, loads, layouts and decisions."""

    ADMIN = "admin"
    """Reads, and orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One proof of who a caller is. A worker's `pool` and `worker` may be `*`, any.

    `name` tells people of one role apart; empty if nobody gave one.
    """

    role: Role
    name: str = ""
    pool: str = ANY
    worker: str = ANY

    def __str__(self) -> str:
        if self.role is Role.WORKER:
            return f"{self.role}/{self.pool}/{self.worker}"
        return f"{self.role}/{self.name}" if self.name else str(self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever is on the other end. Every proof he gave must allow what he does.

    Without proofs he is anybody, which only ports that ask for none let in.
    """

    peer: str
    proofs: tuple[Identity, ...] = ()

    def __str__(self) -> str:
        if not self.proofs:
            return f"somebody at {self.peer}"
        # A token and a certificate mostly say the same.
        return " as ".join(dict.fromkeys(map(str, self.proofs))) + f" at {self.peer}"

    def may(self, roles: Iterable[Role]) -> bool:
        """Whether each proof is of one of these roles."""
        allowed = frozenset(roles)
        return all(proof.role in allowed for proof in self.proofs)

    def may_speak_for(self, *, pool: str, worker: str = ANY) -> bool:
        """Whether he is that worker of that pool, or with `*` for it any of its workers."""
        return all(
            proof.pool in {pool, ANY} and (worker == ANY or proof.worker in {worker, ANY})
            for proof in self.proofs
            if proof.role is Role.WORKER
        )


def parse_identity(words: str) -> Identity | None:
    """What `worker/POOL/WORKER`, `admin/NAME` or a bare role says; None if that is no role.

    Names are percent-decoded, because they may have slashes.
    """
    role, *names = words.split("/")
    if role not in set(Role) or not all(names):
        return None
    names = [unquote(name) for name in names]
    if role == Role.WORKER:
        if len(names) not in {0, 2}:
            return None
        pool, worker = names or (ANY, ANY)
        return Identity(role=Role.WORKER, pool=pool, worker=worker)
    if len(names) > 1:
        return None
    return Identity(role=Role(role), name="".join(names))


def certified(*, common_name: str, alternative_names: Iterable[str]) -> Identity | None:
    """What a certificate says: its first URI with `/equipoise/` in it, else its common name."""
    for name in alternative_names:
        if "://" in name and _URI_MARK in name:
            return parse_identity(name.partition(_URI_MARK)[2])
    return parse_identity(common_name)
