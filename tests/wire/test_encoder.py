"""The shared part of a push is serialised once and decodes as if encoded for each rank."""

from dataclasses import replace

import pytest

from equipoise.wire.convert import to_worker
from equipoise.wire.encoder import Encoder
from equipoise_api.v1 import worker_link_pb2 as pb


def test_every_message_decodes_as_if_encoded_for_one_worker(good):
    encoder = Encoder()
    for value in (*good.from_balancer, *good.from_balancer[::-1]):
        assert pb.ConnectResponse.FromString(encoder.encode(value)) == to_worker(value)


def test_each_rank_gets_its_own_rank_and_moves_with_the_shared_part(good):
    encoder = Encoder()
    for rank in (1, 0):
        seated = replace(good.join_epoch, rank=rank, moves=good.stage.moves[:rank])
        message = pb.ConnectResponse.FromString(encoder.encode(seated)).join_epoch
        assert (message.rank, len(message.moves)) == (rank, rank)
        assert len(message.peers) == 2


@pytest.mark.parametrize(
    "changes", [{"term": 4}, {"timeout_s": 1.0}, {"base_generation": 2}, {"epoch": 2}]
)
def test_a_push_with_any_difference_is_serialised_again(good, changes):
    encoder = Encoder()
    encoder.encode(good.stage)
    other = replace(good.stage, **changes)
    assert pb.ConnectResponse.FromString(encoder.encode(other)) == to_worker(other)


def test_tables_are_serialised_once_for_all_ranks(good, monkeypatch):
    made = []
    monkeypatch.setattr(
        "equipoise.wire.encoder.to_worker", lambda value: made.append(value) or to_worker(value)
    )
    encoder = Encoder()
    for _ in range(5):
        encoder.encode(good.join_epoch)
        encoder.encode(good.stage)
    assert len(made) == 2
