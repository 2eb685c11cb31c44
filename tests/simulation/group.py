"""The process group of ranks without sockets: `meet` and `Mesh` in place of torch.distributed.

What ranks say and decide (announcements, headers) is the worker's own code. A rank that dies or
closes its group ends its peers' next exchange; one that is paused or cut off times them out.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from equipoise.rank.errors import GroupError
from equipoise.rank.header import Arrival, StepHeader, digest_word, peers_digest
from equipoise.worker.errors import StepTimeoutError
from equipoise.worker.group import _agree
from tests.simulation.loop import Process, current_process
from tests.simulation.network import Network

POLL_S = 0.25
MAX_KEYS = 200


class Rendezvous:
    """What each worker hosts: keys by address, for the life of the host."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._hosts: dict[str, tuple[Process, dict[str, Any]]] = {}
        self.on_exchange = lambda _mesh, _headers: None
        self.serials = itertools.count()
        self.on_effect: Callable[[str], None] = lambda _kind: None
        self.unreachable: dict[str, str] = {}
        """Workers that no peer reaches, as the host of a rendezvous or as any rank."""
        self.is_broken = False
        """Whether no group can exchange anything, once it has formed."""

    def host(self, process: Process, address: str) -> None:
        alive = {at: one for at, one in self._hosts.items() if one[0].alive}
        self._hosts = {**alive, address: (process, {})}

    def reach(self, process: Process, address: str) -> dict[str, Any] | None:
        """The keys at an address, if a process can reach its host now."""
        found = self._hosts.get(address)
        if found is None:
            return None
        host, keys = found
        network = self.network
        if not host.alive or host.paused:
            return None
        if host is not process and host.name in self.unreachable:
            self.on_effect(f"unreachable_{self.unreachable[host.name]}")
            return None
        is_cut = network.stops(process.name, host.name) or network.stops(host.name, process.name)
        if host is not process and is_cut:
            return None
        return keys

    async def accepts(self, process: Process, address: str) -> bool:
        """Whether a connection to an address opens; a machine that is out of reach never answers.

        A rendezvous that is out of reach refuses. A paused process does accept: its kernel does it.
        """
        network, is_host = self.network, address in self._hosts
        found = self._hosts.get(address) or network.listener(address)
        if found is None or not found[0].alive:
            return False
        name = found[0].name
        is_cut = network.is_cut(process.name, name) or network.is_cut(name, process.name)
        out_of_reach = self.unreachable.get(name)
        if is_cut or out_of_reach == "rank":
            await asyncio.Event().wait()
        return not (is_host and out_of_reach)

    def can_form(self, names: tuple[str, ...]) -> bool:
        """Whether the ranks of a group can connect to each other, once they have met."""
        if "rank" not in map(self.unreachable.get, names):
            return True
        self.on_effect("unreachable_rank")
        return False


class Mesh:
    """One rank's end of a formed group."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        process: Process,
        *,
        epoch: int,
        rank: int,
        names: tuple[str, ...],
    ) -> None:
        self.rendezvous = rendezvous
        self.serial = next(rendezvous.serials)
        self.process = process
        self.epoch, self.rank, self.names = epoch, rank, names
        self.num_ranks = len(names)
        self.process_group = None
        self.waited_s = 0.0
        self.peers_digest = 0
        self.peers: list[Mesh] = [self]
        self.is_closed = self._is_late = False
        self.step_timeout_s = 0.0
        self._round = 0
        self._headers: dict[int, dict[int, StepHeader]] = {}
        self._waiting: asyncio.Future[None] | None = None
        self._fault: str | None = None

    def close(self) -> None:
        """Leave the group; the other ranks' next collective fails."""
        if self.is_closed:
            return
        self.is_closed = True
        self.process.off_death(self.died)
        self._tell("a peer closed the connection")

    def died(self) -> None:
        self.is_closed = True
        self._tell("connection reset by peer")

    async def gather(self, header: StepHeader) -> tuple[StepHeader, ...]:
        """Send a header and return all ranks' headers.

        Raises:
            GroupError: a peer is gone or does not answer in time.
        """
        if self.rendezvous.is_broken and self.num_ranks > 1:
            self.rendezvous.on_effect("broken_groups")
            raise GroupError("a peer rank failed or hangs: no route to host")
        self._round += 1
        number = self._round
        received = self._headers.setdefault(number, {})
        received[self.rank] = header
        network = self.rendezvous.network
        for peer in self.peers:
            if peer is not self:
                when_s = network.loop.time() + network.delay_s()
                peer.process.call_at(when_s, self._deliver, peer, number, header)
        timer = network.loop.call_later(self.step_timeout_s, self._time_out)
        try:
            while len(received) < self.num_ranks:
                if self._fault is not None:
                    raise GroupError(f"a peer rank failed or hangs: {self._fault}")
                self._waiting = network.loop.create_future()
                await self._waiting
                if self._is_late:
                    raise StepTimeoutError("a peer rank failed or hangs: timed out")
        finally:
            timer.cancel()
        del self._headers[number]
        headers = tuple(received[rank] for rank in range(self.num_ranks))
        self.rendezvous.on_exchange(self, headers)
        return headers

    def _deliver(self, peer: "Mesh", number: int, header: StepHeader) -> None:
        network = self.rendezvous.network
        if network.stops(self.process.name, peer.process.name):
            # TCP sends it again until the cut heals or the collective times out.
            when_s = network.loop.time() + POLL_S
            if not peer.is_closed:
                peer.process.call_at(when_s, self._deliver, peer, number, header)
            return
        peer._headers.setdefault(number, {})[self.rank] = header
        peer._wake()

    def _tell(self, fault: str) -> None:
        network = self.rendezvous.network
        for peer in self.peers:
            if peer is not self and not peer.is_closed:
                peer.process.call_at(
                    network.loop.time() + network.delay_s(), self._break, peer, fault
                )

    def _break(self, peer: "Mesh", fault: str) -> None:
        if self.rendezvous.network.is_cut(self.process.name, peer.process.name):
            return  # It will time out.
        peer._fault = peer._fault or fault
        peer._wake()

    def _time_out(self) -> None:
        self._is_late = True  # Even if a rank that was paused finds the other headers, too.
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


async def meet(
    rendezvous: Rendezvous,
    join_epoch,
    *,
    timeout_s,
    step_timeout_s,
    abandoned,
    on_met,
    check,
    announcement,
) -> Mesh:
    """Form an epoch's group at the rendezvous of its rank 0, as `worker.group.meet` does.

    Raises:
        GroupError: the ranks did not meet or form in time, or do not agree.
    """
    process = current_process()
    assert process is not None
    epoch, rank = join_epoch.epoch, join_epoch.rank
    names = tuple(peer.worker for peer in join_epoch.peers)
    mesh = Mesh(rendezvous, process, epoch=epoch, rank=rank, names=names)
    mesh.step_timeout_s = step_timeout_s
    process.on_death(mesh.died)
    if len(names) == 1:
        check((announcement,))
        on_met()
        return mesh
    mesh.peers_digest = digest_word(peers_digest(join_epoch.peers))
    place = _Place(rendezvous, process, join_epoch, abandoned)
    arrival = Arrival.of(join_epoch, announcement=announcement).to_json()
    try:
        published = await place.gather("arrived", arrival, timeout_s=timeout_s)
        _agree(published, names, check=check, epoch=epoch)
        on_met()
        if not rendezvous.can_form(names):
            await asyncio.sleep(step_timeout_s)
            raise TimeoutError("connecting to a rank timed out")  # noqa: TRY301
        mesh.peers = await place.gather("formed", mesh, timeout_s=step_timeout_s)
        _check_present(mesh.peers)
    except TimeoutError as error:
        mesh.close()
        raise GroupError(
            f"the {len(names)} ranks of epoch {epoch} did not all reach the rendezvous at "
            f"{join_epoch.rendezvous_address} within {timeout_s:g} s: {error}"
        ) from error
    return mesh


def _check_present(peers: list[Mesh]) -> None:
    """An earlier epoch of the same number may have left keys of ranks that are gone."""
    if any(peer.is_closed or not peer.process.alive for peer in peers):
        raise TimeoutError("a rank is gone: connection refused")


class _Place:
    """One rank at the rendezvous of an epoch."""

    def __init__(
        self, rendezvous: Rendezvous, process: Process, join_epoch: Any, abandoned: Any
    ) -> None:
        self._rendezvous, self._process, self._abandoned = rendezvous, process, abandoned
        self._address, self._rank = join_epoch.rendezvous_address, join_epoch.rank
        self._num_ranks = len(join_epoch.peers)
        self._prefix = f"epoch-{join_epoch.epoch}"

    async def gather(self, what: str, mine: Any, *, timeout_s: float) -> list[Any]:
        """Publish something, and return what every rank has published.

        Raises:
            TimeoutError: some have not in time, or the epoch was abandoned.
        """
        loop = self._rendezvous.network.loop
        deadline_s = loop.time() + timeout_s
        names = [f"{self._prefix}/{what}/{number}" for number in range(self._num_ranks)]
        is_published = False
        while True:
            keys = self._rendezvous.reach(self._process, self._address)
            if keys is not None and not is_published:
                keys[names[self._rank]] = mine
                is_published = True
            if keys is not None and all(name in keys for name in names):
                found = [keys[name] for name in names]
                for old in list(keys)[:-MAX_KEYS]:
                    del keys[old]
                return found
            if self._abandoned.is_set():
                raise TimeoutError("abandoned")
            if loop.time() > deadline_s:
                raise TimeoutError("some ranks have not arrived")
            await asyncio.sleep(POLL_S * self._rendezvous.network.rng.uniform(0.2, 1.0))
