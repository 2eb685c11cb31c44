"""Rollouts as scripted in scenarios/*.txt: events with their times, and the expected commands.

# A comment, and a title.
ranks 0 1, generation 7 to 8
at 0.5: rank 0 staged 8
    the commands that follow, one to a line, indented
ends active: reason
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.reconcile import reconcile
from equipoise.planning.rollout import (
    DeadlineCheck,
    PersistCommitted,
    Persisted,
    PersistProposed,
    RankLost,
    RankRejected,
    RankRuns,
    RankStaged,
    RankSwitched,
    SendAbort,
    SendStage,
    Wave,
)

FOLDER = Path(__file__).parent / "scenarios"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))
# No balancer can mend ranks that contradict each other, and what never happened needs no mending.
MENDABLE = [name for name in NAMES if name != "ranks_contradict_each_other" and "false" not in name]
POLICY = Policy(stage_timeout_s=30, switch_timeout_s=30)
LONG_AFTER_S = 1000.0


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_has_the_expected_commands(name):
    scenario = read_scenario(name)
    wave, commands = None, ()
    for moment in scenario.moments:
        wave, commands = (
            begin(scenario) if wave is None else wave.step(moment.event, now=moment.now)
        )
        assert tuple(in_words(command) for command in commands) == moment.commands, moment.line
    assert (wave.state, wave.reason) == (scenario.end_state, scenario.end_reason)
    assert wave.is_over


@pytest.mark.parametrize("name", MENDABLE)
def test_a_balancer_restarted_at_any_line_ends_with_the_generation_of_the_ranks(name):
    scenario = read_scenario(name)
    for restart_at in range(1, len(scenario.moments) + 1):
        before, after = scenario.moments[:restart_at], scenario.moments[restart_at:]
        fleet = _Fleet(scenario)
        for moment in before:
            fleet.hear(moment)
        wave = fleet.restart_balancer(now=before[-1].now)
        wave = fleet.go_on(wave, after)
        context = f"{name}, restarted after {before[-1].line!r}"
        assert fleet.committed.generation == fleet.running, context
        assert wave is None or wave.is_over, context
        assert wave is None or not wave.is_faulted, context


class _Fleet:
    """The world around a rollout: what the store holds and what ranks run and staged."""

    def __init__(self, scenario):
        self._scenario = scenario
        self.committed = scenario.base
        self._proposed = None
        self._staged = {}
        self.running = scenario.base.generation
        self._has_asked = False

    def hear(self, moment):
        """Follow the world as the scenario tells it, commands included."""
        match moment.event:
            case Persisted(generation=generation) if generation == self._scenario.target.generation:
                if self.running == generation:
                    self.committed = self._scenario.target
                else:
                    self._proposed = self._scenario.target
            case RankStaged(rank=rank, generation=generation):
                self._staged[rank] = generation
            case RankRejected(rank=rank):
                self._staged.pop(rank, None)
            case RankSwitched(generation=generation):
                self._switch(generation)
        for command in moment.commands:
            self._has_asked |= command.startswith("stage")
            if command.startswith("abort"):
                self._staged.clear()

    def restart_balancer(self, *, now):
        ranks = range(self._scenario.base.num_ranks)
        found = reconcile(
            generations_of_ranks=dict.fromkeys(ranks, self.running),
            staged_of_ranks=dict(self._staged),
            proposed=self._proposed,
            committed=self.committed,
            policy=POLICY,
            now=now,
        )
        assert found.generation == self.running
        return self._obey(found.wave, found.commands, now)

    def go_on(self, wave, moments):
        """Let the ranks say the rest of what they say, as far as it can still happen."""
        now = 0.0
        for moment in moments:
            now = moment.now
            if not self._has_asked or isinstance(moment.event, Persisted):
                continue
            if isinstance(moment.event, RankSwitched):
                self._switch(moment.event.generation)
            if wave is not None:
                wave, commands = wave.step(moment.event, now=now)
                wave = self._obey(wave, commands, now)
        for _ in range(4):
            now += LONG_AFTER_S
            if wave is not None:
                wave, commands = wave.step(DeadlineCheck(), now=now)
                wave = self._obey(wave, commands, now)
        return wave

    def _switch(self, generation):
        """Ranks switch together, whichever reports it first."""
        self.running = max(self.running, generation)
        self._staged.clear()

    def _obey(self, wave, commands, now):
        for command in commands:
            if isinstance(command, PersistCommitted):
                self.committed = command.layout
                wave, more = wave.step(Persisted(generation=command.layout.generation), now=now)
                assert not more
        return wave


def begin(scenario):
    return Wave.begin(
        base=scenario.base,
        target=scenario.target,
        num_ranks=scenario.base.num_ranks,
        policy=POLICY,
        now=scenario.moments[0].now,
    )


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An event (None to begin) at a time, and the expected commands, as text."""

    line: str
    now: float
    event: object
    commands: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    base: Layout
    target: Layout
    moments: tuple[Moment, ...]
    end_state: str
    end_reason: str


def read_scenario(name):
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith("# "), "a scenario has a title"
    ranks, base, target = re.fullmatch(
        r"ranks ([\d ]+), generation (\d+) to (\d+)", lines[1]
    ).groups()
    num_ranks = len(ranks.split())
    end_state, end_reason = re.fullmatch(r"ends (\w+): (.*)", lines[-1]).groups()
    moments = []
    for line in lines[2:-1]:
        if line.startswith("    "):
            moments[-1]["commands"] += (line.strip(),)
        else:
            now, words = re.fullmatch(r"at ([\d.]+): (.*)", line).groups()
            moments.append(
                {"line": line, "now": float(now), "event": _event(words), "commands": ()}
            )
    return Scenario(
        base=layout(int(base), num_ranks),
        target=layout(int(target), num_ranks),
        moments=tuple(Moment(**moment) for moment in moments),
        end_state=end_state,
        end_reason=end_reason,
    )


def layout(generation, num_ranks):
    """Some valid layout; rollouts do not look inside."""
    experts = np.roll(np.arange(num_ranks, dtype=np.int32), generation)
    return Layout(
        generation=generation,
        num_experts=num_ranks,
        num_ranks=num_ranks,
        expert_of_slot=experts[None, :],
    )


def in_words(command):
    match command:
        case PersistProposed(layout=proposed):
            return f"persist proposed {proposed.generation}"
        case SendStage(layout=staged, base_generation=base):
            return f"stage {staged.generation} on {base}"
        case PersistCommitted(layout=committed):
            return f"persist committed {committed.generation}"
        case SendAbort(generation=generation, reason=reason):
            return f"abort {generation}: {reason}"


_PATTERNS = {
    r"persisted (\d+)": lambda generation: Persisted(generation=int(generation)),
    r"rank (\d+) staged (\d+)": lambda rank, generation: RankStaged(
        rank=int(rank), generation=int(generation)
    ),
    r"rank (\d+) rejected (\d+): (.*)": lambda rank, generation, reason: RankRejected(
        rank=int(rank), generation=int(generation), reason=reason
    ),
    r"rank (\d+) switched (\d+) at step (\d+) in (\d+) us": (
        lambda rank, generation, step, stall_us: RankSwitched(
            rank=int(rank), generation=int(generation), step=int(step), stall_us=int(stall_us)
        )
    ),
    r"rank (\d+) lost: (.*)": lambda rank, reason: RankLost(rank=int(rank), reason=reason),
    r"rank (\d+) runs (\d+)": lambda rank, running: RankRuns(rank=int(rank), running=int(running)),
    r"tick": DeadlineCheck,
    r"begin": lambda: None,
}


def _event(words):
    for pattern, make in _PATTERNS.items():
        if found := re.fullmatch(pattern, words):
            return make(*found.groups())
    raise AssertionError(f"no such event: {words}")
