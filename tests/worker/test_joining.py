"""A worker that begins fills its slots from the checkpoint, an expert at a time."""

import threading
from types import SimpleNamespace

from equipoise.telemetry.loading import Loading
from equipoise.trust.credentials import Credentials
from equipoise.trust.settings import Tls
from equipoise.worker.core import ModelCore
from equipoise.worker.joining import Slots
from equipoise.worker.waits import Waits


async def test_experts_are_read_into_their_slots_one_by_one_and_it_is_told(
    settings, random_layout, assignment, monkeypatch
):
    chosen = settings()
    core, events, said = ModelCore.load(chosen), [], []

    def noted(what, owner, name):
        do = getattr(owner, name)

        def call(*arguments):
            events.append(what)
            return do(*arguments)

        monkeypatch.setattr(owner, name, call)

    noted("read", core.checkpoint, "read_expert")
    for experts in core.slots:
        noted("write", experts, "write")
    hello = SimpleNamespace(
        address="127.0.0.1:1", node="n", worker="w", rendezvous_address="127.0.0.1:2"
    )
    slots = Slots(
        core,
        credentials=Credentials(Tls()),
        waits=Waits.of(chosen),
        loading=Loading(say=lambda _, done, total: said.append((done, total))),
    )
    layout = random_layout(1)
    settle = await slots.prepare(assignment([hello], layout), given_up=threading.Event())
    settle()
    num_experts = layout.expert_of_slot.size
    assert events == ["read", "write"] * num_experts
    total = num_experts * core.shape.expert_bytes
    assert said[-1] == (total, total)
    assert slots.held is not None
