import hashlib

import pytest
import torch

from equipoise_model.experts import PayloadError, StagedExperts, checksum, payload_from_bytes
from equipoise_model.plain.experts import ExpertSlots

DIM, HIDDEN = 32, 16
EXPERT_BYTES = 3 * DIM * HIDDEN * 2


def make_slots(num_slots=4):
    slots = ExpertSlots(DIM, HIDDEN, num_slots=num_slots)
    for parameter in slots.parameters():
        torch.nn.init.normal_(parameter)
    return slots


def make_payload():
    return torch.randn(EXPERT_BYTES // 2).to(torch.bfloat16).view(torch.uint8)


def test_a_payload_is_gate_then_up_then_down_row_by_row_in_bf16():
    slots = make_slots()
    gate, up = torch.randn(HIDDEN, DIM).bfloat16(), torch.randn(HIDDEN, DIM).bfloat16()
    down = torch.randn(DIM, HIDDEN).bfloat16()
    slots.write(2, torch.cat([t.flatten() for t in (gate, up, down)]).view(torch.uint8))
    assert torch.equal(slots.gate_up[2, :HIDDEN], gate.float())
    assert torch.equal(slots.gate_up[2, HIDDEN:], up.float())
    assert torch.equal(slots.down[2], down.float())


def test_what_is_written_is_read_back_to_the_bit_and_other_slots_stay():
    slots = make_slots()
    others = [slots.read(slot) for slot in (0, 1, 2)]
    payload = make_payload()
    slots.write(3, payload)
    assert torch.equal(slots.read(3), payload)
    assert all(torch.equal(slots.read(slot), other) for slot, other in enumerate(others))


def test_a_read_payload_is_a_copy_of_its_own():
    slots = make_slots()
    payload = make_payload()
    slots.write(0, payload)
    seen = slots.read(0)
    slots.write(0, make_payload())
    assert torch.equal(seen, payload)


@pytest.mark.parametrize(
    "payload",
    [
        torch.zeros(EXPERT_BYTES - 2, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(EXPERT_BYTES),
    ],
)
def test_a_payload_of_another_size_or_type_is_rejected_by_both_numbers(payload):
    with pytest.raises(PayloadError, match=f"{EXPERT_BYTES} bytes.*another model"):
        make_slots().write(0, payload)


def test_staged_experts_change_nothing_until_applied_and_then_only_their_slots():
    layers = [make_slots(), make_slots(), make_slots()]
    before = {(la, s): layers[la].read(s) for la in range(3) for s in range(4)}
    payloads = {(0, 3): make_payload(), (2, 0): make_payload(), (2, 1): make_payload()}
    staged = StagedExperts.prepare(payloads, layers)
    assert all(torch.equal(layers[la].read(s), kept) for (la, s), kept in before.items())
    staged.apply()
    for key, kept in before.items():
        assert torch.equal(layers[key[0]].read(key[1]), payloads.get(key, kept))


def test_staging_nothing_makes_a_switch_without_copies():
    layers = [make_slots()]
    before = layers[0].gate_up.clone()
    StagedExperts.prepare({}, layers).apply()
    assert torch.equal(layers[0].gate_up, before)


def test_staged_experts_do_not_share_memory_with_the_received_payload():
    layers = [make_slots()]
    payload = make_payload()
    wanted = payload.clone()
    staged = StagedExperts.prepare({(0, 1): payload}, layers)
    payload.zero_()
    staged.apply()
    assert torch.equal(layers[0].read(1), wanted)


def test_staging_rejects_a_payload_that_does_not_fit():
    with pytest.raises(PayloadError):
        StagedExperts.prepare({(0, 0): torch.zeros(8, dtype=torch.uint8)}, [make_slots()])


def test_a_checksum_is_blake2b_of_the_bytes():
    payload = make_payload()
    data = bytearray(payload.tolist())
    assert checksum(payload) == hashlib.blake2b(data, digest_size=16).digest()
    assert torch.equal(payload_from_bytes(data), payload)
    data[-1] ^= 1
    assert checksum(payload_from_bytes(data)) != checksum(payload)


def test_received_bytes_become_a_payload_without_a_copy():
    data = bytearray(b"abc")
    payload = payload_from_bytes(data)
    data[0] = 7
    assert payload.tolist() == [7, 98, 99]
    assert payload_from_bytes(bytearray()).numel() == 0
