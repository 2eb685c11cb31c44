"""The contract of the store, as a state machine of one pool: what histories are checked against."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class State:
    """What a store holds of one pool, as its contract says."""

    term: int = 0
    is_fenced: bool = True
    """Whether the server has the replication ID with which the term began."""
    proposed: frozenset = frozenset()
    highest: int = 0
    committed: int | None = None
    num_audit: int = 0
    hold: str = ""
    epoch: int = 0


def step(state, what):
    """The contract of the store: the next state and the result of an operation."""
    name, *arguments = what
    if name == "recall":
        shown = (state.committed, state.hold, state.num_audit, state.highest, state.epoch)
        return state, shown
    if name == "new server":
        return replace(state, is_fenced=False), "ok"
    *arguments, term = arguments
    if name == "fence":
        is_new = term > state.term
        return (replace(state, term=term, is_fenced=True), "ok") if is_new else (state, "over")
    if term != state.term or not state.is_fenced:
        return state, "over"
    return WRITES[name](state, *arguments)


def propose(state, generation):
    if generation in state.proposed:
        return state, "ok"
    if generation <= state.highest:
        return state, "conflict"
    return replace(state, proposed=state.proposed | {generation}, highest=generation), "ok"


def commit(state, generation, previous):
    if state.committed == generation:
        return state, "ok"
    if state.committed != previous or generation not in state.proposed:
        return state, "conflict"
    return replace(state, committed=generation), "ok"


def adopt(state, generation):
    highest, proposed = max(state.highest, generation), state.proposed | {generation}
    return replace(state, committed=generation, highest=highest, proposed=proposed), "ok"


def member(state, epoch):
    return (state, "conflict") if epoch < state.epoch else (replace(state, epoch=epoch), "ok")


def restore(state, text, after, sequence, epoch, highest):
    if after != state.num_audit:
        return state, "conflict"
    return replace(
        state,
        hold=text,
        num_audit=sequence,
        epoch=max(state.epoch, epoch),
        highest=max(state.highest, highest),
    ), "ok"


def hold(state, text, after):
    state, result = rebalance(state, text, after)
    return (state, result) if result == "conflict" else (replace(state, hold=text), result)


def rebalance(state, _who, after):
    if after != state.num_audit:
        return state, "conflict"
    return replace(state, num_audit=after + 1), after + 1


WRITES = {
    "propose": propose,
    "commit": commit,
    "adopt": adopt,
    "member": member,
    "restore": restore,
    "pause": hold,
    "pin": hold,
    "rebalance": rebalance,
}
