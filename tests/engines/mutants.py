"""Faults planted in the plugin itself, in each rank of a real engine before it has a seat."""

from dataclasses import replace

import torch

from equipoise.engines.loads import SeatLoads
from equipoise.engines.seat import EngineSeat
from equipoise.engines.slots import EngineSlots
from equipoise.planning.layout import Layout

_HASTY_RANK = 1


def _commit_by(change):
    """Switch tables in another way: `change(one, commit)` returns what commits."""

    def plant(one):
        begin = EngineSeat.__init__

        def begin_with(seat, model, *args, **named):
            commit = change(one, model.commit)
            begin(seat, replace(model, commit=commit), *args, **named)

        EngineSeat.__init__ = begin_with

    return plant


def _without_table(number):
    def change(one, commit):
        def skip(made):
            table = one.whole_tables()[number]
            before = table.clone()
            commit(made)
            table.copy_(before)

        return skip

    return _commit_by(change)


def _a_layer_late(_one, commit):
    def late(made):
        in_place = isinstance(made[0], torch.Tensor)
        roll = lambda values: values.roll(1, dims=0)  # noqa: E731
        commit([roll(one) if in_place else (one[0], roll(one[1])) for one in made])

    return late


def _slots_of_the_next_rank(_one):
    own_slots = Layout.own_slots

    def off_by_one(layout, rank):
        return own_slots(layout, (rank + 1) % layout.num_ranks)

    Layout.own_slots = off_by_one


def _dropped_while_advertised(one):
    header = EngineSeat._header

    def forgetful(seat):
        row = header(seat)
        seat._advertised = None
        return row

    if one.rank == _HASTY_RANK:
        EngineSeat._header = forgetful


def _payload_swapped(_one):
    """After their checksums were verified."""
    stage = EngineSlots.stage

    def swapped(slots, payloads):
        first = slots._sizes[0]
        turned = {
            slot: torch.cat([payload[first:], payload[:first]])
            for slot, payload in payloads.items()
        }
        return stage(slots, turned)

    EngineSlots.stage = swapped


def _scales_forgotten(_one):
    begin = EngineSlots.__init__
    EngineSlots.__init__ = lambda slots, tensors: begin(slots, list(tensors)[:-1])


def _counted_twice(_one):
    take = SeatLoads._take

    def take_and_keep(loads, passes):
        counted = loads._counted.clone()
        taken = take(loads, passes)
        loads._counted.copy_(counted)
        return taken

    SeatLoads._take = take_and_keep


MUTANTS = {
    "experts of slots not switched": _without_table(0),
    "slots of experts not switched": _without_table(-2),
    "replica counts not switched": _without_table(-1),
    "tables switched one layer late": _commit_by(_a_layer_late),
    "the slots of the next rank": _slots_of_the_next_rank,
    "dropped while advertised": _dropped_while_advertised,
    "two tensors of an expert swapped": _payload_swapped,
    "scales not moved": _scales_forgotten,
    "counters not cleared": _counted_twice,
}
"""What is planted, by its name."""
