"""`equipoise decisions`, `audit`, `epochs`, `loads` and `layout ...`, on a scripted balancer."""

import json
import math
from concurrent import futures
from dataclasses import replace

import grpc
import numpy as np
import pytest

from equipoise.cli.live import client, decisions, layouts, loads
from equipoise.cli.live.client import BalancerRejectedError
from equipoise.cli.live.settings import (
    AuditSettings,
    BalancerClientSettings,
    DecisionsSettings,
    LayoutDiffSettings,
    LayoutExportSettings,
    LayoutImportSettings,
    LayoutShowSettings,
    LoadsSettings,
)
from equipoise.formats.errors import FormatError
from equipoise.formats.files import read_placement
from equipoise.formats.format import Format
from equipoise.planning.layout import contiguous_layout
from equipoise.settings.errors import InvalidSettingsError
from equipoise.wire.layouts import layout_from_proto, layout_to_proto
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2_grpc, worker_link_pb2
from equipoise_api.v1 import status_pb2 as pb

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 8, 4
FIRST = contiguous_layout(
    num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, slots_per_rank=3
)


def moved(layout):
    """Another layout: in layer 1, rank 0 holds expert 7 in place of expert 0, once more."""
    table = layout.expert_of_slot.copy()
    table[1, 0] = 7
    return layout.with_placement(table, generation=layout.generation + 1)


class Balancer(status_pb2_grpc.StatusServicer, admin_pb2_grpc.AdminServicer):
    """Knows one pool."""

    def __init__(self):
        self.layouts = {1: FIRST, 2: moved(FIRST)}
        self.loads = pb.GetLoadsResponse(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
        self.decisions = []
        self.audit = []
        self.status = pb.PoolStatus(pool="decode", epoch=3)
        self.pinned = None

    def ListPools(self, request, context):  # noqa: N802 - gRPC's name
        return pb.ListPoolsResponse()

    def GetStatus(self, request, context):  # noqa: N802 - gRPC's name
        return pb.GetStatusResponse(status=self.status)

    def WatchStatus(self, request, context):  # noqa: N802 - gRPC's name
        yield pb.WatchStatusResponse(status=self.status)

    def ListDecisions(self, request, context):  # noqa: N802 - gRPC's name
        return pb.ListDecisionsResponse(decisions=self.decisions[: request.limit])

    def GetLoads(self, request, context):  # noqa: N802 - gRPC's name
        return self.loads

    def GetLayout(self, request, context):  # noqa: N802 - gRPC's name
        generation = request.generation or max(self.layouts)
        if generation not in self.layouts:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no generation {generation}")
        return pb.GetLayoutResponse(
            layout=layout_to_proto(self.layouts[generation]), node_of_rank=["a", "a", "b", "b"]
        )

    def ListAudit(self, request, context):  # noqa: N802 - gRPC's name
        return admin_pb2.ListAuditResponse(entries=self.audit[: request.limit])

    def Pin(self, request, context):  # noqa: N802 - gRPC's name
        self.pinned = request
        return admin_pb2.PinResponse(
            outcome=admin_pb2.Outcome(accepted=True, reason="it goes there now")
        )


@pytest.fixture
def balancer():
    return Balancer()


@pytest.fixture
def address(balancer):
    server = grpc.server(futures.ThreadPoolExecutor(4))
    status_pb2_grpc.add_StatusServicer_to_server(balancer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(balancer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10)


def a_decision(**values):
    """A verdict without traffic, but for the `values`."""
    unknown = dict.fromkeys(
        ("balancedness_current", "balancedness_proposed", "balancedness_realised"), math.nan
    )
    return pb.Decision(**{"time_unix_s": 1e9, "kind": "plan", **unknown, **values})


def a_window(balancer):
    of_rank = np.array([[40.0, 20, 20, 20], [25, 25, 25, 25], [10, 10, 10, 70]])
    balancer.loads.window_assignments = np.ones((NUM_LAYERS, NUM_EXPERTS)).tobytes()
    balancer.loads.num_ranks = NUM_RANKS
    balancer.loads.window_rank_assignments = of_rank.tobytes()
    balancer.loads.window_generation = 2
    return of_rank


def test_a_layout_is_shown_by_layer_and_one_layer_by_rank(address, capsys):
    assert layouts.show(LayoutShowSettings(address=address)) == 0
    out = capsys.readouterr().out
    assert "generation 2: 3 layers x 8 experts in 12 slots on 4 ranks" in out
    assert layouts.show(LayoutShowSettings(address=address, generation=1, layer=1)) == 0
    first_rank = capsys.readouterr().out.splitlines()[2]
    assert first_rank.split() == ["0", "a", "0", "1", "2"]
    with pytest.raises(InvalidSettingsError, match="--layer must be from 0 to 2, not 3"):
        layouts.show(LayoutShowSettings(address=address, layer=3))


def test_a_shared_expert_in_slots_is_named_wherever_experts_are(address, balancer, capsys):
    model = worker_link_pb2.ModelShape(num_layers=3, num_experts=8, has_shared_expert=True)
    balancer.status.model.CopyFrom(model)
    layouts.show(LayoutShowSettings(address=address))
    out = capsys.readouterr().out
    assert "generation 2: 3 layers x 7 experts and the shared one in 12 slots on 4 ranks" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["1"])
    assert row[-2:] == ["shared", "x2"]
    layouts.show(LayoutShowSettings(address=address, layer=1))
    ranks = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "a", "shared", "1", "2"] in ranks
    layouts.show(LayoutShowSettings(address=address, json=True))
    assert json.loads(capsys.readouterr().out)["shared_expert"] == 7
    assert layouts.diff(LayoutDiffSettings(address=address, before="1", after="2")) == 3
    assert "shared +1" in capsys.readouterr().out
    a_window(balancer)
    busy = np.ones((NUM_LAYERS, NUM_EXPERTS))
    busy[:, 7] = 7
    balancer.loads.window_assignments = busy.tobytes()
    loads.run(LoadsSettings(address=address, top=2))
    assert "shared 50.0%      0  7.1%" in capsys.readouterr().out


def test_a_layout_as_json_is_whole(address, capsys):
    layouts.show(LayoutShowSettings(address=address, json=True))
    printed = json.loads(capsys.readouterr().out)
    assert printed["expert_of_slot"] == moved(FIRST).expert_of_slot.tolist()
    assert printed["node_of_rank"] == ["a", "a", "b", "b"]


def test_two_generations_are_compared_and_the_exit_status_shows_it(address, capsys):
    settings = LayoutDiffSettings(address=address, before="1", json=True)
    assert layouts.diff(settings) == layouts.EXIT_DIFFERENT
    printed = json.loads(capsys.readouterr().out)
    assert (printed["moves"], printed["moves_of_layer"]) == (1, [0, 1, 0])
    assert printed["moves_of_rank"] == [1, 0, 0, 0]
    assert layouts.diff(replace(settings, json=False)) == layouts.EXIT_DIFFERENT
    assert "layer 1: 1 moves; replicas per expert: 0 -1  7 +1" in capsys.readouterr().out
    assert layouts.diff(replace(settings, before="2", after="2")) == 0


@pytest.mark.parametrize("form", [Format.EQUIPOISE, Format.SGLANG, Format.TENSORRT_LLM])
def test_an_exported_layout_is_the_same_when_it_is_read_again(address, tmp_path, form):
    path = tmp_path / ("layout.yaml" if form is Format.TENSORRT_LLM else "layout.json")
    export = LayoutExportSettings(address=address, file=path, format=form, first_moe_layer=3)
    assert layouts.export(export) == 0
    table = read_placement(path, form=form).expert_of_slot
    # TensorRT-LLM and SGLang count dense layers too.
    assert np.array_equal(table[-NUM_LAYERS:], moved(FIRST).expert_of_slot)


def test_a_watched_export_follows_what_is_committed(
    address, balancer, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "layout.yaml"
    export = LayoutExportSettings(
        address=address, file=path, format=Format.TENSORRT_LLM, first_moe_layer=3, watch=True
    )
    balancer.layouts, balancer.status.generation = {1: FIRST}, 1
    written = []

    def sleep(_seconds):
        written.append(read_placement(path, form=Format.TENSORRT_LLM).expert_of_slot[-NUM_LAYERS:])
        if len(written) == 3:
            raise KeyboardInterrupt
        balancer.layouts[2], balancer.status.generation = moved(FIRST), 2

    monkeypatch.setattr(client.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        layouts.export(export)
    assert np.array_equal(written[0], FIRST.expert_of_slot)
    assert np.array_equal(written[1], moved(FIRST).expert_of_slot)
    assert capsys.readouterr().out.count("wrote generation") == 2


def test_only_the_committed_layout_can_be_watched(tmp_path):
    with pytest.raises(InvalidSettingsError, match="watch and generation 1 cannot be combined"):
        LayoutExportSettings(file=tmp_path / "x.json", generation=1, watch=True)


def test_importing_a_file_pins_its_layout(address, balancer, tmp_path, capsys):
    path = tmp_path / "mine.json"
    layouts.export(LayoutExportSettings(address=address, file=path, generation=1))
    assert layouts.import_(LayoutImportSettings(address=address, file=path)) == 0
    assert "done: it goes there now" in capsys.readouterr().out
    assert layout_from_proto(balancer.pinned.layout).same_placement(FIRST)
    assert balancer.pinned.reason == "imported from mine.json"


def test_a_file_for_another_pool_is_not_imported(address, balancer, tmp_path):
    path = tmp_path / "other.json"
    other = contiguous_layout(num_layers=2, num_experts=8, num_ranks=4, slots_per_rank=3)
    balancer.layouts = {1: other}
    layouts.export(LayoutExportSettings(address=address, file=path))
    balancer.layouts = {1: FIRST}
    with pytest.raises(FormatError, match="2 MoE layers, expected 3"):
        layouts.import_(LayoutImportSettings(address=address, file=path))
    assert balancer.pinned is None


def test_loads_are_shown_by_layer_and_rank(address, balancer, capsys):
    of_rank = a_window(balancer)
    assert loads.run(LoadsSettings(address=address, json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["pool"], printed["generation"]) == ("decode", 2)
    assert printed["rank_load"] == of_rank.tolist()
    assert printed["balancedness_of_layer"] == pytest.approx([25 / 40, 1.0, 25 / 70])
    assert loads.run(LoadsSettings(address=address)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "0.357", "0.40", "0.40", "0.40", "2.80"] in rows


def test_more_ranks_than_columns_show_the_busiest_of_neighbours():
    heat = loads.Heat(
        pool="big",
        generation=1,
        rank_load=np.ones((1, 400)) + 399 * np.eye(1, 400, k=200),
        expert_load=np.zeros((1, 8)),
        shared_expert=None,
    )
    console = loads.console()
    with console.capture() as caught:
        console.print(loads.heat_view(heat, width=80, top=3, has_color=False))
    assert "each cell shows the busiest of 8 ranks" in " ".join(caught.get().split())


def test_loads_are_readable_without_colour(address, balancer, capsys):
    of_rank = np.tile([10.0, 10, 10, 10, 10, 10, 20, 4], 40)
    balancer.loads.num_ranks, balancer.loads.num_layers = of_rank.size, 1
    balancer.loads.window_assignments = np.ones((1, NUM_EXPERTS)).tobytes()
    balancer.loads.window_rank_assignments = of_rank[None].tobytes()
    assert loads.run(LoadsSettings(address=address)) == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if line.startswith("    0  ") and "%" not in line)
    assert row.split()[-1].startswith("▄███▄███▄"), "each cell is the busiest of six neighbours"
    assert "below the mean  ▁▂▃▄▅▆▇█ above" in out


@pytest.mark.parametrize("width", [80, 200])
def test_a_layer_without_load_shows_no_cells(width):
    heat = loads.Heat(
        pool="decode",
        generation=1,
        rank_load=np.array([[1.0, 3.0], [0.0, 0.0]]),
        expert_load=np.zeros((2, 8)),
        shared_expert=None,
    )
    console = loads.console()
    with console.capture() as caught:
        console.print(loads.heat_view(heat, width=width, top=3, has_color=False))
    assert "busiest experts" not in caught.get()
    lines = [line.split() for line in caught.get().splitlines()]
    assert ["0", "0.667", "0.50", "1.50"] in lines
    assert ["1", "no", "data"] in lines


def test_loads_are_written_as_a_picture(address, balancer, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a_window(balancer)
    path = tmp_path / "loads.svg"
    assert loads.run(LoadsSettings(address=address, out=path)) == 0
    assert "balancedness" in path.read_text()
    assert str(path) in capsys.readouterr().out
    with pytest.raises(InvalidSettingsError, match=r"must end in \.png or \.svg"):
        LoadsSettings(out=tmp_path / "loads.gif")


def test_a_pool_without_a_window_has_no_loads_yet(address):
    with pytest.raises(BalancerRejectedError, match="has closed no window yet"):
        loads.run(LoadsSettings(address=address))


def test_decisions_are_shown_newest_first(address, balancer, capsys):
    balancer.decisions = [
        a_decision(sequence=2, accepted=True, reason="it pays", balancedness_current=0.9),
        a_decision(sequence=1, reason="it [b]does[/b] not"),
    ]
    assert decisions.run(DecisionsSettings(address=address)) == 0
    out = capsys.readouterr().out
    assert [out.count(words) for words in ("0.900 ", "→", "no data")] == [1, 0, 1]
    assert out.index("it pays") < out.index("it [b]does[/b] not")
    assert "0.000" not in out
    assert decisions.run(DecisionsSettings(address=address, json=True, limit=1)) == 0
    (printed,) = json.loads(capsys.readouterr().out)["decisions"]
    assert (printed["sequence"], printed["accepted"], printed["reason"]) == (2, True, "it pays")


def test_audit_records_are_shown_with_caller_and_outcome(address, balancer, capsys):
    assert decisions.audit(AuditSettings(address=address)) == 0
    assert "no operator has requested anything yet" in capsys.readouterr().out
    balancer.audit = [
        pb.AuditRecord(sequence=2, who="bo", what="pin", accepted=False, outcome="[b]busy[/b]"),
        pb.AuditRecord(
            sequence=1, who="ann", what="pause", accepted=True, outcome="planning is paused"
        ),
    ]
    assert decisions.audit(AuditSettings(address=address)) == 0
    words = capsys.readouterr().out.split()
    assert words[words.index("bo") : words.index("bo") + 4] == [
        "bo",
        "pin",
        "rejected",
        "[b]busy[/b]",
    ]
    assert words[words.index("ann") : words.index("ann") + 3] == ["ann", "pause", "accepted"]
    assert decisions.audit(AuditSettings(address=address, json=True, limit=1)) == 0
    (printed,) = json.loads(capsys.readouterr().out)["audit"]
    assert (printed["sequence"], printed["who"], printed["accepted"]) == (2, "bo", False)


def test_tables_are_whole_lines_in_a_pipe(address, balancer, capsys):
    long = "many words " * 30 + "end"
    balancer.decisions = [pb.Decision(sequence=1, time_unix_s=1e9, reason=long, kind="plan")]
    balancer.audit = [pb.AuditRecord(sequence=1, who="w" * 150, what=long, outcome=long)]
    balancer.status.epochs.add(epoch=3, workers=["a"], reason=long, opened_unix_s=1e9)
    for command, settings in (
        (decisions.run, DecisionsSettings),
        (decisions.audit, AuditSettings),
        (decisions.epochs, BalancerClientSettings),
    ):
        assert command(settings(address=address)) == 0
        _, line = capsys.readouterr().out.splitlines()
        assert long in line


def test_epochs_are_shown_with_their_reasons(address, balancer, capsys):
    assert decisions.epochs(BalancerClientSettings(address=address)) == 0
    assert "is in epoch 3" in capsys.readouterr().out
    balancer.status.epochs.add(
        epoch=3, workers=["a", "b"], reason="worker c is gone", opened_unix_s=1e9
    )
    assert decisions.epochs(BalancerClientSettings(address=address)) == 0
    assert "worker c is gone" in capsys.readouterr().out
