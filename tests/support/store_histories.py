"""Random histories of the store while replicas of its Redis are promoted and links part one way.

Several balancers request pauses, pins and rebalances, propose, commit, adopt and roll back layouts,
record epochs, write back what they believe the store has lost, and read what is committed, held and
recorded, each with `RedisStore` over a link of its own. Every promotion makes a branch: the old
primary may go on answering those who reach it. A promotion must continue from one moment of the
branch before, no earlier than the last write that the replica acknowledged; within a branch, all
must be linearizable.

`python -m tests.support.store_histories --histories 100` checks many and prints what they had.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from redis import Redis

from equipoise.balancer.store.redis_store import RedisStore
from equipoise.balancer.store.store import StoreConflictError, StoreError, TermOverError
from equipoise.pool.records import EpochMembers, ForgottenRecords, Hold
from tests.support.linearizability import UNKNOWN, Operation, UndecidedError, is_linearizable
from tests.support.links import Namespace, Proxies
from tests.support.redis_replica import is_synchronised, promote, replication_id, until
from tests.support.redis_server import RedisServer
from tests.support.store_contract import State, step
from tests.support.store_records import AN_ORDER, layout_of, same

TIMEOUT_S = 0.5
NUM_CLIENTS = 3
TERMS_OF_A_CLIENT = 1000
"""Distance between the terms of one client: those of different ones differ."""
MAX_OPERATIONS = 60
"""On each branch: more would take long to check."""

IMPOSSIBLE = object()
"""The result of an operation on a branch that does not exist yet."""


def step_of_branches(branches, what):
    """The next states of all branches; a promotion begins the one after that which it names."""
    number, *what = what
    if number >= len(branches):
        return branches, IMPOSSIBLE
    if what == ["promote"]:
        is_next = number == len(branches) - 1
        promoted = replace(branches[number], is_fenced=False)
        return (*branches, promoted) if is_next else branches, "ok"
    state, result = step(branches[number], what)
    return (*branches[:number], state, *branches[number + 1 :]), result


class Client:
    """A balancer's store, which records what it is asked and what it answers.

    It begins another term when its own ends with a failover. With a `branch`, that is the first
    part of every operation.
    """

    def __init__(self, address, history, *, term, branch=None) -> None:
        self.store = RedisStore(f"redis://{address}/0", timeout_s=TIMEOUT_S)
        self.history, self.term, self.latest_audit = history, term, 0
        self._is_fenced = False
        self._branch = () if branch is None else (branch,)
        self._calls = {
            "fence": lambda: self.store.fence(term=self.term),
            "recall": lambda: self.store.recall("p"),
            "propose": lambda g: self.store.put_proposed("p", _layout(g), term=self.term),
            "commit": lambda g, old: self.store.commit("p", g, previous=old, term=self.term),
            "adopt": lambda g: self.store.adopt("p", _layout(g), term=self.term),
            "member": lambda e: self.store.put_membership("p", _members(e), term=self.term),
            "restore": self._restore,
            "pause": lambda who, after: self._request(who, Hold(paused=who), after),
            "pin": lambda who, after: self._request(who, Hold(pinned=who, pin=_layout(1)), after),
            "rebalance": lambda who, after: self._request(who, None, after),
        }

    async def _request(self, who, held, after):
        record = replace(AN_ORDER, who=who)
        return await self.store.add_audit("p", record, hold=held, after=after, term=self.term)

    async def _restore(self, who, after, sequence, epoch, highest):
        lost = ForgottenRecords(
            after=after,
            audit=(replace(AN_ORDER, who=who, sequence=sequence),),
            hold=Hold(paused=who),
            members=_members(epoch),
            next_generation=highest + 1,
        )
        await self.store.restore("p", lost, term=self.term)

    async def do(self, name, *arguments):
        """Carry out an operation and record it; returns its result."""
        loop = asyncio.get_running_loop()
        called_s, result, term = loop.time(), UNKNOWN, self.term
        try:
            result = _plain(name, await self._calls[name](*arguments))
            self._note(name, result)
        except TermOverError as error:
            result = "over"
            if error.highest_term <= term:
                self.term, self._is_fenced = term + TERMS_OF_A_CLIENT, False
        except StoreConflictError:
            result = "conflict"
        except StoreError:
            pass
        what = (*self._branch, name, *arguments, *(() if name == "recall" else (term,)))
        times = {} if result is UNKNOWN else {"returned_s": loop.time()}
        if result is not UNKNOWN or name != "recall":
            self.history.append(Operation(what=what, called_s=called_s, result=result, **times))
        return result

    def _note(self, name, result):
        """Note the number of the latest audit record, and whether the term has begun."""
        if name in {"pause", "pin", "rebalance"}:
            self.latest_audit = result
        elif name == "recall" and isinstance(result, tuple):
            self.latest_audit = result[2]
        elif name == "fence":
            self._is_fenced = True

    async def act(self, chance, generations):
        """Do one thing that a leader does; the generations are used up by all."""
        if not self._is_fenced:
            await self.do("fence")
        who = f"{self.term}-{chance.randrange(1000)}"
        match chance.randrange(8):
            case 0:
                await self.do("recall")
            case 1:
                await self.do(chance.choice(["pause", "pin", "rebalance"]), who, self.latest_audit)
            case 2:
                await self.do("adopt", _maybe_used(chance, generations))
            case 3:
                await self.do("member", _maybe_used(chance, generations))
            case 4:
                after, number = self.latest_audit, _maybe_used(chance, generations)
                sequence = after + chance.randint(1, 2)
                await self.do("restore", who, after, sequence, number, number)
            case _:
                known = await self.do("recall")
                generation = next(generations)
                if isinstance(known, tuple) and await self.do("propose", generation) == "ok":
                    await self.do("commit", generation, known[0])


def _layout(generation):
    """Some generations have the placement of an earlier one, as after a rollback."""
    return layout_of(generation, shift=generation % 4)


def _members(epoch):
    return EpochMembers(epoch=epoch, workers=(f"first-of-{epoch}", f"second-of-{epoch}"))


def _maybe_used(chance, generations):
    """A new number, or a low one, which others have most likely passed."""
    return chance.choice([next(generations), chance.randint(1, 9)])


def _plain(name, result):
    """The result of an operation, as `step` gives it."""
    if name in {"pause", "pin", "rebalance"}:
        return result.sequence
    if name != "recall":
        return "ok"
    layout, members = result.committed, result.members
    if layout is not None and not same(layout, _layout(layout.generation)):
        return "another layout"
    if members is not None and members != _members(members.epoch):
        return "other members"
    return (
        layout and layout.generation,
        result.hold.paused or result.hold.pinned,
        result.audit[0].sequence if result.audit else 0,
        result.next_generation - 1,
        members.epoch if members else 0,
    )


class Promotions:
    """Servers, each a replica of the one before, and the clients' ways to them."""

    def __init__(self, folder, links, history) -> None:
        self._folder, self._links, self._history = Path(folder), links, history
        self._servers = []
        self._acknowledged_s = 0.0
        self.counts = Counter()

    async def __aenter__(self):
        self._stack = AsyncExitStack()
        self._servers.append(await self._start())
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    @property
    def newest(self):
        """Number of the branch that was promoted last."""
        return len(self._servers) - 1

    async def _start(self, **options):
        folder = self._folder / f"redis-{len(self._servers)}"
        server = RedisServer(folder, options={"bind": "*", **options})
        self._stack.callback(server.kill)
        await asyncio.to_thread(server.start)
        return server

    async def route(self, who, branch):
        """host:port at which a client reaches a branch's server, over a link of its own."""
        return await self._links.route(f"{who}-{branch}", self._servers[branch].port)

    async def replica(self):
        """Start a replica of the newest server; returns it once it is synchronised."""
        primary, branch = self._servers[-1], self.newest
        before, began_s = replication_id(primary), _now_s()
        host, port = (await self._links.route(f"replica-{self.newest}", primary.port)).split(":")
        server = await self._start(**{"replicaof": f"{host} {port}", "repl-timeout": 60})
        with Redis.from_url(server.url) as client:
            await until(lambda: is_synchronised(client))
        if replication_id(primary) != before:  # It had no replica and no backlog yet.
            what = (branch, "new server")
            self._history.append(
                Operation(what=what, called_s=began_s, returned_s=_now_s(), result="ok")
            )
        self._acknowledged_s = began_s
        return server

    async def note_acknowledged(self):
        """Note up to when the replica has everything, if it says so soon."""
        now_s = _now_s()
        with Redis.from_url(self._servers[-1].url) as client:
            # On a thread, because the link to the replica may run in this loop.
            await asyncio.to_thread(client.incr, "probe")
            if await asyncio.to_thread(client.wait, 1, 200):
                self._acknowledged_s = now_s

    async def part_replica(self):
        """Part the newest server from its replica until that is promoted."""
        await self._links.hold(f"replica-{self.newest}", ("up", "down"))

    async def promote(self, replica):
        """Make the replica the next branch. The one before lives on for those who reach it."""
        branch = self.newest
        called_s = self._acknowledged_s
        await asyncio.to_thread(promote, replica)
        what = (branch, "promote")
        self._history.append(
            Operation(what=what, called_s=called_s, returned_s=_now_s(), result="ok")
        )
        self._servers.append(replica)
        self.counts["promotions"] += 1

    def end(self, branch):
        """End a branch's server."""
        self._servers[branch].kill()

    async def disturb(self, chance):
        """Part one link in one or both directions, or stop the newest server, for a moment."""
        duration_s = chance.uniform(0.0, 1.2 * TIMEOUT_S)
        if chance.randrange(5) == 0:
            self._servers[-1].pause()
            await asyncio.sleep(duration_s)
            self._servers[-1].resume()
            self.counts["pauses"] += 1
            return
        name = chance.choice(self._links.names)
        await self._links.hold(name, chance.choice([("up",), ("down",), ("up", "down")]))
        await asyncio.sleep(duration_s)
        await self._links.heal(name)
        self.counts["partitions"] += 1


@dataclass(slots=True, kw_only=True)
class Run:
    """One history that is being made."""

    fleet: Promotions
    seed: int
    history: list
    ended: bool = False
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    terms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def live(self, who):
        """Act at one branch after the other, for a while also at one that was left behind."""
        chance = random.Random(f"{self.seed}-{who}")
        for branch in itertools.count():
            address = await self.fleet.route(who, branch)
            client = Client(address, self.history, term=next(self.terms), branch=branch)
            try:
                await client.do("fence")
                while self.fleet.newest == branch or chance.random() < 0.8:
                    if self.ended:
                        return
                    if len(self.history) < MAX_OPERATIONS * (self.fleet.newest + 1):
                        await client.act(chance, self.generations)
                    await asyncio.sleep(chance.uniform(0.0, 0.05))
            finally:
                await client.store.close()

    async def promote(self, num_promotions, *, before):
        """Disturb the links and promote one replica after the other, then end the clients."""
        chance, fleet = random.Random(self.seed), self.fleet
        for branch in range(num_promotions):
            replica = await fleet.replica()
            for _ in range(chance.randrange(1, 4)):
                await fleet.disturb(chance)
                await fleet.note_acknowledged()
            if chance.randrange(2):
                await fleet.part_replica()
                await asyncio.sleep(chance.uniform(0.0, 0.3))
            before(replica)
            await fleet.promote(replica)
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            fleet.end(branch)
        await asyncio.sleep(TIMEOUT_S)
        self.ended = True


async def history_of(folder, seed, *, links, num_promotions=2, before=lambda _replica: None):
    """A history, and the number of its operations, promotions and the like.

    `before` is called with each replica that is about to be promoted.
    """
    history = []
    async with links, Promotions(folder, links, history) as fleet:
        run = Run(fleet=fleet, seed=seed, history=history)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENTS):
                tasks.create_task(run.live(f"client-{number}"))
            await run.promote(num_promotions, before=before)
    fleet.counts["operations"] = len(history)
    fleet.counts["unknown"] = sum(one.result is UNKNOWN for one in history)
    return history, fleet.counts


def is_sound(history):
    """Whether branches explain the history.

    Raises:
        UndecidedError: too many orders are possible.
    """
    return is_linearizable(history, step_of_branches, (State(),))


def _now_s():
    return asyncio.get_running_loop().time()


def main() -> int:
    """Check many histories; 1 if any is not linearizable."""
    parser = argparse.ArgumentParser(prog="store_histories", description=__doc__)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--promotions", type=int, default=2, help="of each (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--namespace", action="store_true", help="part packets, with iptables")
    options = parser.parse_args()
    totals = Counter()
    for seed in range(options.first, options.first + options.histories):
        links = Namespace() if options.namespace else Proxies()
        with tempfile.TemporaryDirectory() as folder:
            made = history_of(folder, seed, links=links, num_promotions=options.promotions)
            history, counts = asyncio.run(made)
        totals += Counter(histories=1) + counts
        try:
            if not is_sound(history):
                totals["violations"] += 1
                print(f"seed {seed}: not linearizable:", *history, sep="\n  ", flush=True)
        except UndecidedError as error:
            totals["undecided"] += 1
            print(f"seed {seed}: {error}", flush=True)
        if seed % 10 == 9 or seed == options.first + options.histories - 1:
            print(", ".join(f"{count} {what}" for what, count in totals.items()), flush=True)
    return int(totals["violations"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
