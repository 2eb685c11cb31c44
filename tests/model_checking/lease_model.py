"""The lease protocol: candidates, their clocks and a register.

Candidates run the table of `leader_state.py`. Requests to the register may be delayed, lost before
or after they take effect, or take effect after their sender has given up; processes pause for any
time, crash and come back; the register may be emptied, or go back to any record that it held.

All clocks run at one rate. Times are relative to now, and a field that no handler compares in a
state is cleared, so that the model is finite for a bounded number of terms. States that differ only
in which of two candidates has which name count as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from equipoise.balancer.leadership.leader_state import (
    SKIPPED_TERMS,
    Due,
    Failed,
    LeaderRole,
    LeaderState,
    LeaseEvent,
    Overtaken,
    ReadRegister,
    Saw,
    WriteRegister,
    Wrote,
)
from equipoise.balancer.leadership.lease import Candidate, LeaseRecord, LeaseTiming, Sighting
from equipoise.wire.checks import MAX_TERM
from tests.model_checking.explorer import Model

TIMING = LeaseTiming(duration_s=3.0, renew_deadline_s=2.0, retry_s=1.0, request_timeout_s=1.0)
"""The smallest whole seconds that a lease admits; a transition of the clock is one second."""

ROUNDS_TO_CONVERGE = 24
"""Seconds after the last fault within which one candidate leads."""

NOW, OLD, LATE = "now", "old", "late"
"""Versions of the register's record, as handlers compare them: what it holds now, what it held
before, and what it held before but was read later than what the candidate saw."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request to the register that its sender waits for."""

    request: ReadRegister | WriteRegister
    sent_s: float = 0.0
    answer: LeaseEvent | None = None
    """What the register answered; None until the request took effect."""


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A candidate, and its request in flight; equal ones are one object (`_process`)."""

    state: LeaderState
    call: Call | None


class World(NamedTuple):
    """A state of the model."""

    processes: tuple[Process, ...]

    held: LeaseRecord | None
    """What the register holds."""

    is_latest: bool
    """Whether the record was written since the register last went back."""

    earlier: frozenset[LeaseRecord]
    """What it held before, and may go back to; empty once it cannot."""

    stray: LeaseRecord | None
    """A write that may still take effect though its sender no longer waits for it."""

    led: frozenset[tuple[int, str]]
    """Every (term, candidate) that has led."""

    faults_left: int
    """How often a process may still crash, or the register be emptied or go back."""

    was_emptied: bool
    """Whether the register is empty because it lost its record."""

    was_taken_blindly: bool
    """Whether a candidate that had never seen a lease took the register after that. It cannot know
    of the leader before, so they overlap until the next renewal. They have the same term, because
    here all candidates begin with term 1, and not with a random one."""

    suspended: tuple[int, str] | None
    """Term and candidate that led when it was suspended together with its clock: until its next
    renewal it cannot know that another one has led since."""

    broken: str
    """The invariant that the last transition broke."""


def lease_model(
    *, candidates: int, max_terms: int, faults: int, first_term: int = 0
) -> Model[World]:
    """Return the model; it is not followed once more than `max_terms` terms were claimed.

    Without that bound it has no end: a candidate whose claim is not answered never leads, and the
    next one claims a later term. `first_term` is the term that the register remembers, to explore
    numeric limits.
    """
    names = [chr(ord("a") + number) for number in range(candidates)]
    held = None
    if first_term:
        held = LeaseRecord(holder="", address="", term=first_term, renewals=0, duration_s=3.0)
    return Model(
        initial=World(
            processes=tuple(_started(name) for name in names),
            held=held,
            is_latest=True,
            earlier=frozenset(),
            stray=None,
            led=frozenset(),
            faults_left=faults,
            was_emptied=False,
            was_taken_blindly=False,
            suspended=None,
            broken="",
        ),
        transitions=lambda world: _transitions(world, last_claim=first_term + max_terms),
        violation=_violation,
        converges=_converges,
        canonical=_canonical,
    )


def takeover_model(*, max_terms: int, faults: int) -> Model[World]:
    """Return the model from when `b` leads, although `a`, which led before, never saw its term."""
    model = lease_model(candidates=2, max_terms=max_terms, faults=faults)
    world = _round(model.initial, 0)
    while not world.processes[1].state.leads(now=0.0):
        world = _round(_aged(world), 1)
    return replace(model, initial=world)


def woken_model(*, max_terms: int, faults: int) -> Model[World]:
    """Return the model from when `b` leads and `a` wakes, which led when its clock stood still."""
    model = lease_model(candidates=2, max_terms=max_terms, faults=faults)
    world = _round(model.initial, 0)
    suspended = _outdated(world.processes[0])
    while not world.processes[1].state.leads(now=0.0):
        world = _round(_aged(world), 1)
    return replace(model, initial=_put(world, 0, suspended)._replace(suspended=(1, "a")))


# What may happen. -------------------------------------------------------------------------------


def _transitions(world: World, *, last_claim: int) -> Iterator[tuple[str, World]]:
    if world.broken or (world.held is not None and _claims(world.held.term) > last_claim):
        return
    yield "a second passes", _aged(world)
    if world.stray is not None:
        yield "a late write takes effect", _hold(world, world.stray)._replace(stray=None)
    for index, process in enumerate(world.processes):
        for label, following in _moves(world, index, process):
            yield f"{process.state.candidate.name} {label}", following
    if world.faults_left and world.held is not None:
        emptied = _hold(world, None)._replace(stray=None, was_emptied=True)
        yield "the register forgets", _after_fault(emptied)
    for record in sorted(world.earlier, key=repr):
        older = _after_fault(_hold(world, record)._replace(is_latest=False))
        yield f"the register goes back to {record.holder!r} in term {record.term}", older


def _claims(term: int) -> int:
    """How many claims led to a term, without those that faults may have lost."""
    return term % SKIPPED_TERMS if term < MAX_TERM - SKIPPED_TERMS else term


def _after_fault(world: World) -> World:
    """One fault less is left; without any, it does not matter what the register held before."""
    left = world.faults_left - 1
    return world._replace(faults_left=left, earlier=world.earlier if left else frozenset())


def _moves(world: World, index: int, process: Process) -> Iterator[tuple[str, World]]:
    call, state = process.call, process.state
    if call is None:
        yield "starts a round", _step(world, index, Due())
    elif call.answer is not None:
        yield f"receives {type(call.answer).__name__}", _step(world, index, call.answer)
        yield "receives no answer", _step(world, index, Failed(reason=""))
    else:
        yield f"has its {type(call.request).__name__} carried out", _carry_out(world, index)
        if -call.sent_s >= TIMING.request_timeout_s:
            late = world
            if _would_succeed(world, call.request) and world.stray is None:
                late = world._replace(stray=call.request.record)
            yield "stops waiting", _step(late, index, Failed(reason=""))
    if world.faults_left:
        # A process that comes back has a name of its own.
        restarted = _started(f"{state.candidate.name}'")
        yield "crashes and restarts", _put(_after_fault(world), index, restarted)


def _step(world: World, index: int, event: LeaseEvent) -> World:
    before = world.processes[index].state
    process = _stepped(before, event)
    state = process.state
    following = _put(world, index, process)
    if state.highest_term < before.highest_term:
        return following._replace(broken=f"terms never decrease: {before} -> {state}")
    if state.leads(now=0.0):
        latest = max((term for term, _ in world.led), default=0)
        if isinstance(event, Wrote) and state.term < latest and not world.was_taken_blindly:
            fault = f"no term continues after a later one: term {state.term} after {latest}"
            return following._replace(broken=fault)
        led = world.led | {(state.term, state.candidate.name)}
        return following if led == world.led else following._replace(led=led)
    return following


def _carry_out(world: World, index: int) -> World:
    """The register carries out a request; its answer is under way."""
    process = world.processes[index]
    call, seen = process.call, process.state.seen
    assert call is not None, "only called with a request"
    answer: LeaseEvent
    if isinstance(call.request, ReadRegister):
        held = world.held
        sighting = held and Sighting(record=held, version=NOW, is_latest=world.is_latest)
        answer = Saw(sighting=sighting)
        return _put(world, index, _process(process.state, Call(ReadRegister(), 0.0, answer)))
    if not _would_succeed(world, call.request):
        return _put(world, index, _process(process.state, Call(ReadRegister(), 0.0, Overtaken())))
    record = call.request.record
    state = process.state if seen is None else _process_with(process, version=OLD).state
    answer = Wrote(sighting=Sighting(record=record, version=NOW), sent_s=call.sent_s)
    following = _hold(world, record)
    return _put(following, index, _process(state, Call(ReadRegister(), 0.0, answer)))


def _would_succeed(world: World, request: ReadRegister | WriteRegister) -> bool:
    """Whether a write replaces what the register holds."""
    if isinstance(request, ReadRegister):
        return False
    return request.replacing == (NOW if world.held is not None else None)


def _hold(world: World, record: LeaseRecord | None) -> World:
    """The register holds another record; all that was read or is to replace it is outdated."""
    processes = tuple(_outdated(process) for process in world.processes)
    is_blind = record is not None and not record.is_vacancy and record.term == 1
    if world.was_emptied and world.held is None and is_blind:
        world = world._replace(was_taken_blindly=True)
    earlier = world.earlier
    if world.held is not None and record != world.held and world.faults_left:
        earlier = earlier | {world.held}
    # A write that is late replaces what the register held, so it fails from now on.
    return world._replace(
        processes=processes,
        held=record,
        is_latest=True,
        earlier=earlier,
        stray=None,
        was_emptied=world.was_emptied and record is None,
    )


def _put(world: World, index: int, process: Process) -> World:
    processes = world.processes
    return world._replace(processes=(*processes[:index], process, *processes[index + 1 :]))


# Processes. -------------------------------------------------------------------------------------


_AWAITED = LeaseRecord(holder="?", address="", term=0, renewals=0, duration_s=TIMING.duration_s)
"""Stands for a record that a candidate has seen and does not hold: it will read it again."""


@cache
def _process(state: LeaderState, call: Call | None) -> Process:
    """Return the process that is in this state: handlers compare no other field."""
    is_leading = state.role is LeaderRole.LEADING
    seen = state.seen
    waits = seen is not None and not (
        seen.is_latest
        and seen.record.term == state.register_term
        and seen.record.holder in {"", state.candidate.name}
    )
    if seen is not None and seen.version == LATE:
        seen = replace(seen, version=OLD)
    if seen is not None and not is_leading:
        answer = call.answer if call is not None else None
        may_repeat = seen.version == NOW or (
            isinstance(answer, Saw | Wrote)
            and answer.sighting is not None
            and answer.sighting.version == OLD
        )
        waits = waits and may_repeat
        record = replace(_AWAITED, holder="?" if waits else "", term=state.register_term)
        is_latest = seen.is_latest or not waits
        seen = Sighting(record=record, version=seen.version, is_latest=is_latest)
    longest_s = TIMING.duration_s
    if seen is not None and not seen.is_latest:
        longest_s += TIMING.round_s
    relevant = replace(
        state,
        seen=seen,
        reason="",
        term=state.term if is_leading else 0,
        renewed_s=max(state.renewed_s, -TIMING.renew_deadline_s) if is_leading else 0.0,
        looked_s=state.looked_s if waits else 0.0,
        unchanged_s=min(state.unchanged_s, longest_s) if waits else 0.0,
    )
    return _unique(relevant, call)


@cache
def _unique(state: LeaderState, call: Call | None) -> Process:
    return Process(state, call)


@cache
def _started(name: str) -> Process:
    candidate = Candidate(name=name, address=f"{name}:7070", term_offset=1)
    return _process(LeaderState(candidate=candidate, timing=TIMING), None)


@cache
def _stepped(state: LeaderState, event: LeaseEvent) -> Process:
    """The candidate after an event, with its next request."""
    after, request = state.step(event, now=0.0)
    if isinstance(request, WriteRegister):
        request = replace(request, record=replace(request.record, renewals=0))
    return _process(after, None if request is None else Call(request))


@cache
def _older(process: Process) -> Process:
    """A second later."""
    state, call = process.state, process.call
    state = replace(
        state,
        renewed_s=state.renewed_s - 1.0,
        looked_s=max(state.looked_s - 1.0, -TIMING.round_s),
    )
    if call is None:
        return _process(state, None)
    if isinstance(call.answer, Wrote):
        sent_s = max(call.answer.sent_s - 1.0, -TIMING.renew_deadline_s)
        return _process(state, replace(call, answer=replace(call.answer, sent_s=sent_s)))
    if call.answer is not None:
        return _process(state, call)
    is_read = isinstance(call.request, ReadRegister)
    most_s = TIMING.request_timeout_s if is_read else TIMING.renew_deadline_s
    return _process(state, replace(call, sent_s=max(call.sent_s - 1.0, -most_s)))


def _aged(world: World) -> World:
    return world._replace(processes=tuple(_older(process) for process in world.processes))


@cache
def _outdated(process: Process) -> Process:
    """What it knows of the register is no longer what the register holds."""
    state, call = process.state, process.call
    same = True
    if state.seen is not None and state.seen.version == NOW:
        state = replace(state, seen=replace(state.seen, version=OLD))
    else:
        same = False
    if call is None:
        return _process(state, None)
    answer, request = call.answer, call.request
    sighting = answer.sighting if isinstance(answer, Saw | Wrote) else None
    if sighting is not None and sighting.version == NOW:
        answer = replace(answer, sighting=replace(sighting, version=OLD if same else LATE))
    if isinstance(request, WriteRegister) and request.replacing is not None:
        # One for an empty register takes effect whenever it is empty.
        request = replace(request, replacing=OLD)
    return _process(state, Call(request, call.sent_s, answer))


def _process_with(process: Process, *, version: str) -> Process:
    state = process.state
    assert state.seen is not None, "only called with a sighting"
    return _process(replace(state, seen=replace(state.seen, version=version)), process.call)


# Symmetry. --------------------------------------------------------------------------------------


def _canonical(world: World) -> World:
    """One of the two worlds that differ only in which candidate is `a` and which is `b`."""
    if len(world.processes) != 2:
        return world
    mirrored = world._replace(
        processes=tuple(_mirrored(process) for process in reversed(world.processes)),
        held=_mirrored_record(world.held),
        earlier=frozenset(_mirrored_record(one) for one in world.earlier),
        stray=_mirrored_record(world.stray),
        led=frozenset((term, _mirrored_name(name)) for term, name in world.led),
        suspended=world.suspended and (world.suspended[0], _mirrored_name(world.suspended[1])),
    )
    return min(world, mirrored, key=hash)


def _mirrored_name(name: str) -> str:
    """The other candidate's name, of a process that crashed as often; names end a holder's."""
    head, mark, last = name.rpartition(" ")
    return head + mark + last.translate({ord("a"): "b", ord("b"): "a"})


@cache
def _mirrored_record(record: LeaseRecord | None) -> LeaseRecord | None:
    if record is None or not record.holder:
        return record
    name, colon, port = record.address.partition(":")
    address = f"{_mirrored_name(name)}{colon}{port}"
    return replace(record, holder=_mirrored_name(record.holder), address=address)


def _mirrored_sighting(sighting: Sighting | None) -> Sighting | None:
    if sighting is None:
        return None
    record = _mirrored_record(sighting.record)
    assert record is not None, "a sighting has a record"
    return replace(sighting, record=record)


@cache
def _mirrored(process: Process) -> Process:
    state, call = process.state, process.call
    name = _mirrored_name(state.candidate.name)
    candidate = Candidate(name=name, address=f"{name}:7070", term_offset=1)
    state = replace(state, candidate=candidate, seen=_mirrored_sighting(state.seen))
    if call is None:
        return _process(state, None)
    request, answer = call.request, call.answer
    if isinstance(request, WriteRegister):
        record = _mirrored_record(request.record)
        assert record is not None, "a write has a record"
        request = replace(request, record=record)
    if isinstance(answer, Saw):
        answer = replace(answer, sighting=_mirrored_sighting(answer.sighting))
    elif isinstance(answer, Wrote):
        sighting = _mirrored_sighting(answer.sighting)
        assert sighting is not None, "an answer to a write has a sighting"
        answer = replace(answer, sighting=sighting)
    return _process(state, Call(request, call.sent_s, answer))


# What must hold. --------------------------------------------------------------------------------


def _violation(world: World) -> str:
    if world.broken:
        return world.broken
    if any(term > MAX_TERM for term, _ in world.led):
        return f"terms end at {MAX_TERM}: {sorted(world.led)}"
    if world.was_taken_blindly:
        return ""
    leaders = [one.state for one in world.processes if one.state.leads(now=0.0)]
    leaders = [one for one in leaders if (one.term, one.candidate.name) != world.suspended]
    if len(leaders) > 1:
        return f"one balancer leads: {[state.candidate.name for state in leaders]} lead"
    if len({term for term, _ in world.led}) < len(world.led):
        return f"a term has one leader: {sorted(world.led)}"
    return ""


def _converges(world: World) -> str:
    """Run on without faults, every process in turn; one must lead in the end."""
    world = world._replace(stray=None, faults_left=0)
    for _ in range(ROUNDS_TO_CONVERGE):
        for index in range(len(world.processes)):
            world = _round(world, index)
        world = _aged(world)
    leaders = [one.state.candidate.name for one in world.processes if one.state.leads(now=0.0)]
    if len(leaders) == 1:
        return ""
    return f"one balancer leads {ROUNDS_TO_CONVERGE} s after the last fault: {leaders} lead"


def _round(world: World, index: int) -> World:
    """One whole election round of a process, whose requests are answered at once."""
    if world.processes[index].call is None:
        world = _step(world, index, Due())
    for _ in range(4):
        call = world.processes[index].call
        if call is None:
            return world
        if call.answer is None:
            world = _carry_out(world, index)
            call = world.processes[index].call
        assert call is not None, "a request that is carried out is still in flight"
        world = _step(world, index, call.answer or Overtaken())
    return world
