"""The model in FP8: its torch twins against the model in BF16, the interpreted kernels against its
twins, switches of its map, and captured steps against eager ones."""

import dataclasses
import warnings
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from equipoise_kernels.numerics import difference
from equipoise_model.checkpoint import Checkpoint, save
from equipoise_model.checkpoint_convert import convert
from equipoise_model.config import Fp8Config
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.experts import PayloadError, StagedExperts, checksum
from equipoise_model.fp8.graphs import DecodeGraphs, sizes
from equipoise_model.fp8.rows import MicroBatch
from equipoise_model.fp8.transformer import Fp8Transformer, _rows_of
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables
from equipoise_model.step import StepBatch
from tests.support.fp8_models import NARROW, WIDE
from tests.support.kernel_backends import use_backends

FIRST, SECOND = [[0, 1, 2, 3, 0]], [[2, 1, 0, 3, 1]]
NUM_SLOTS, NUM_SPARE = 5, 2
# For each sequence its tokens so far and those of the step: a prompt each, then both continue.
STEPS = (([], [5, 9, 2, 40, 7]), ([], [11, 3])), (([5, 9, 2, 40, 7], [8]), ([11, 3], [60]))


def again():
    """Replay a captured graph's memory accesses: the same work on the same tensors."""
    return lambda work: work


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    """The torch twins, although test processes interpret kernels."""
    select(monkeypatch, "reference")


@pytest.fixture
def interpreted():
    """Kernels run in Triton's interpreter, with its casts corrected."""
    pytest.importorskip("triton", reason="kernels need the extra `kernels`")
    from equipoise_kernels.fp8.testing.interpreter import corrected_casts

    with corrected_casts(), warnings.catch_warnings():
        # How the interpreter reads the bounds of a loop.
        warnings.filterwarnings(
            "ignore", "Conversion of an array with ndim > 0", DeprecationWarning
        )
        # Padding rows hold arbitrary values, and their results are never read.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def select(monkeypatch, backend):
    use_backends(monkeypatch, backend)


@pytest.fixture
def path(random_model, tmp_path):
    save(random_model(NARROW), tmp_path / "fp8", fp8=Fp8Config())
    return tmp_path / "fp8"


@pytest.fixture
def checkpoint(path):
    return Checkpoint.open(path, keep_fp8=True)


def loaded(checkpoint, *, graphs=None, layout=FIRST, num_spare=NUM_SPARE):
    model = Fp8Transformer(
        checkpoint.config, num_slots=len(layout[0]), num_spare=num_spare, graphs=graphs
    )
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, layout)
    return model


def placement(layout, generation=1, *, shares=None):
    num_experts = 1 + max(map(max, layout))
    return PlacementTables.from_layout(
        layout, num_experts=num_experts, generation=generation, share_of_slot=shares
    )


def cache_of(dtype=torch.bfloat16):
    return LatentCache(NARROW, num_blocks=8, max_len=64, dtype=dtype)


def batch(step):
    """A step's rows; logits of each sequence's last."""
    tokens, positions, sequences, samples = [], [], [], []
    for index, (before, new) in enumerate(step):
        tokens += new
        positions += range(len(before), len(before) + len(new))
        sequences += [index] * len(new)
        samples.append(len(tokens) - 1)
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        block_tables=[[3 * index + 1, 3 * index] for index in range(len(step))],
        sample_rows_S=torch.tensor(samples, dtype=torch.int64),
    )


def staged(checkpoint, before, after, model):
    moves = {
        (layer, slot): checkpoint.read_expert(layer, expert)
        for layer, row in enumerate(after)
        for slot, expert in enumerate(row)
        if before[layer][slot] != expert
    }
    return StagedExperts.prepare(moves, model.slots)


def served(
    model, checkpoint, *, steps=STEPS, first=FIRST, switched=None, shares=(None, None), is_cut=False
):
    """Logits of each step, and the loads; before the last step a switch, if there is one.

    `shares` are those of the layout before and behind it. Steps of several rows may be cut in two.
    """
    experts, cache, logits = (
        ExpertParallel.local(NARROW, placement(first, shares=shares[0])),
        cache_of(),
        [],
    )
    for index, step in enumerate(steps):
        if switched is not None and index == len(steps) - 1:
            staged(checkpoint, first, switched, model).apply()
            experts.switch(placement(switched, 2, shares=shares[1]))
        one = batch(step)
        if is_cut and one.num_tokens > 1:
            second = 1 + one.num_tokens // 3
            experts.agree([[one.num_tokens - second], [second]])
        logits.append(model.step(one, cache, experts).logits_SV.float())
    return logits, [load.slot_load_LS.tolist() for load in experts.loads()]


def test_the_twins_match_the_model_within_the_precision_of_fp8(path, checkpoint):
    plain = Checkpoint.open(path).load_model()
    experts, cache = ExpertParallel.local(NARROW), cache_of(torch.float32)
    expected = [plain.step(batch(step), cache, experts).logits_SV for step in STEPS]
    logits, _ = served(loaded(checkpoint), checkpoint)
    for ours, theirs in zip(logits, expected, strict=True):
        assert difference(ours, theirs) < 5e-3


# Expert 4 is the shared one: replicated, and moved by the switch.
ROUTED_FIRST, ROUTED_SECOND = [[0, 1, 2, 3, 4, 4]], [[4, 1, 2, 3, 0, 4]]


def test_the_shared_expert_in_slots_changes_logits_by_no_more_than_rounding(path, checkpoint):
    expected, _ = served(loaded(checkpoint), checkpoint)
    routed = Checkpoint.open(path, keep_fp8=True, shared_as_routed=True)
    how = {"first": ROUTED_FIRST, "switched": ROUTED_SECOND}
    logits, loads = served(loaded(routed, layout=ROUTED_FIRST), routed, **how)
    for ours, theirs in zip(logits, expected, strict=True):
        assert difference(ours, theirs) < 5e-3
    after, before = loads[0][0], loads[1][0]
    assert before[4] + before[5] == 7, "every token of the first step"
    assert after[0] + after[5] == 2
    assert (sum(before), sum(after)) == (7 * 3, 2 * 3)
    # Tokens do not depend on the layout, nor on whether the step is captured.
    elsewhere, _ = served(loaded(routed, layout=ROUTED_SECOND), routed, first=ROUTED_SECOND)
    graphs = DecodeGraphs(max_rows=8, new_capture=again)
    captured = served(loaded(routed, layout=ROUTED_FIRST, graphs=graphs), routed, **how)
    assert graphs._graphs
    assert captured[1] == loads
    for ours, other, replayed in zip(logits, elsewhere, captured[0], strict=True):
        assert torch.equal(ours, other)
        assert torch.equal(ours, replayed)


def drafted(model, *, dtype):
    """Hidden states and logits of the module's rows in each step, and what all layers counted."""
    experts = ExpertParallel.local(model.config)
    cache = LatentCache(model.config, num_blocks=8, max_len=64, mtp=True, dtype=dtype)
    made = []
    for step in STEPS:
        output = model.step(batch(step), cache, experts)
        rows = len(output.hidden_TD)
        hidden_TD = output.draft(
            output.hidden_TD, torch.arange(rows) + 7, depth=1, tokens_by_rank=(rows,)
        )
        made += [hidden_TD.float(), model.lm_head(hidden_TD).detach().float()]
    return made, experts.loads()[0].slot_load_LS


def test_the_draft_module_matches_the_one_in_bf16_and_is_counted(random_model, tmp_path):
    config = dataclasses.replace(NARROW, num_nextn_predict_layers=1)
    save(random_model(config, mtp=True), tmp_path / "mtp", fp8=Fp8Config())
    expected, expected_loads = drafted(
        Checkpoint.open(tmp_path / "mtp").load_model(mtp=True), dtype=torch.float32
    )
    checkpoint = Checkpoint.open(tmp_path / "mtp", keep_fp8=True)
    model = Fp8Transformer(checkpoint.config, num_slots=4, num_spare=1, mtp=True)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, [range(4)] * 2)
    ours, loads = drafted(model, dtype=torch.bfloat16)
    for mine, theirs in zip(ours, expected, strict=True):
        # It starts from hidden states that differ as much as the model's.
        assert difference(mine, theirs) < 1e-2
    assert loads.sum(axis=1).tolist() == expected_loads.sum(axis=1).tolist() == [9 * 2] * 2
    assert len(model.slots) == 2


@pytest.mark.parametrize(
    ("backends", "tokens", "most"),
    [
        ("triton,mla_decode=reference", ([5], [8]), 1e-4),
        # Its weights are bfloat16, which makes codes next to a rounding edge differ, a sixteenth
        # each; what FP8 costs is the bound.
        ("triton", ([5, 9],), 5e-3),
    ],
)
def test_the_interpreted_kernels_step_as_the_twins_do(
    checkpoint, interpreted, monkeypatch, backends, tokens, most
):
    both = [(([*chain(*tokens[:n])], new),) for n, new in enumerate(tokens)]
    expected, expected_loads = served(loaded(checkpoint), checkpoint, steps=both, switched=SECOND)
    select(monkeypatch, backends)
    logits, loads = served(loaded(checkpoint), checkpoint, steps=both, switched=SECOND)
    assert loads == expected_loads
    for ours, theirs in zip(logits, expected, strict=True):
        assert difference(ours, theirs) < most


def test_a_switch_changes_the_map_and_no_weight_in_use(checkpoint):
    model = loaded(checkpoint)
    (slots,) = model.slots
    held, place = slots.gate_up.codes[:NUM_SLOTS].clone(), slots.place_of_slot
    experts = staged(checkpoint, FIRST, [[0, 1, 2, 1, 3]], model)
    assert place.tolist() == [0, 1, 2, 3, 4]
    experts.apply()
    assert place is slots.place_of_slot
    assert place.tolist() == [0, 1, 2, 5, 6]
    assert torch.equal(slots.gate_up.codes[:NUM_SLOTS].float(), held.float())


def test_tokens_do_not_depend_on_the_layout_nor_on_the_switch(checkpoint):
    expected, _ = served(loaded(checkpoint), checkpoint)
    switched, _ = served(loaded(checkpoint), checkpoint, switched=SECOND)
    assert all(map(torch.equal, switched, expected))


@pytest.mark.parametrize("num_spare", [0, 1, 4])
def test_moves_beyond_the_spare_places_are_copied_at_the_switch(checkpoint, num_spare):
    model = loaded(checkpoint, num_spare=num_spare)
    for before, after in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, SECOND)):
        staged(checkpoint, before, after, model).apply()
        for slot, expert in enumerate(after[0]):
            assert torch.equal(model.slots[0].read(slot), checkpoint.read_expert(0, expert))


def test_places_of_a_generation_in_use_are_not_reused_by_the_next(checkpoint):
    model = loaded(checkpoint)
    aborted = staged(checkpoint, FIRST, [[1, 0, 2, 3, 0]], model)
    following = staged(checkpoint, FIRST, [[3, 2, 2, 3, 0]], model)
    assert len(model.slots[0]._spare) == 0
    # The ranks had agreed already, so it is switched to all the same.
    aborted.apply()
    assert [model.slots[0].read(s).tolist() for s in (0, 1)] == [
        checkpoint.read_expert(0, expert).tolist() for expert in (1, 0)
    ]
    del aborted, following
    assert sorted(model.slots[0]._spare) == [0, 1]


def test_payloads_of_a_bf16_checkpoint_are_those_of_its_conversion(random_model, tmp_path):
    save(random_model(NARROW), tmp_path / "bf16")
    convert(Checkpoint.open(tmp_path / "bf16"), tmp_path / "fp8", fp8=Fp8Config())
    quantized = Checkpoint.open(tmp_path / "bf16", quantize_as=Fp8Config())
    stored = Checkpoint.open(tmp_path / "fp8", keep_fp8=True)
    assert quantized.config == stored.config
    for expert in range(4):
        ours, theirs = (one.read_expert(0, expert) for one in (quantized, stored))
        assert checksum(ours) == checksum(theirs)
    ours, theirs = loaded(quantized).state_dict(), loaded(stored).state_dict()
    for name in theirs.keys() - {f"layers.{n}.self_attn.kv_b_proj.weight" for n in (0, 1)}:
        assert torch.equal(ours[name].float(), theirs[name].float()), name


def test_a_payload_of_another_size_is_rejected(checkpoint):
    (slots,) = loaded(checkpoint).slots
    short = checkpoint.read_expert(0, 0)[:-4]
    for use in (lambda: slots.write(0, short), lambda: slots.stage({1: short})):
        with pytest.raises(PayloadError, match="comes from another model or was cut short"):
            use()
    assert len(slots._spare) == NUM_SPARE


def test_rows_in_slot_order_go_the_same_way_as_rows_by_their_slots(checkpoint):
    (slots,) = loaded(checkpoint).slots
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows_per_slot = [2, 0, 1, 3, 1]
    y = slots(x, rows_per_slot)
    first = 0
    for slot, count in enumerate(rows_per_slot):
        alone = [0] * NUM_SLOTS
        alone[slot] = count
        assert torch.equal(slots(x[first : first + count], alone), y[first : first + count])
        first += count
    assert slots(x[:0], [0] * NUM_SLOTS).shape == (0, 128)


UNEVEN = [[2**13, 2**15, 2**15, 2**15, 3 * 2**13]]
UNEVEN_BEHIND = [[2**15, 3 * 2**13, 2**15, 2**15, 2**13]]


@pytest.mark.parametrize(
    "shares",
    [
        (None, None),
        (UNEVEN, UNEVEN_BEHIND),
        (UNEVEN, None),
        (None, UNEVEN_BEHIND),
    ],
)
def test_captured_steps_are_the_eager_ones_across_a_switch(checkpoint, shares):
    decode = [(([5, 9], [n]), ([7], [n + 1]), ([1, 2, 3], [n + 2])) for n in range(4)]
    how = {"steps": decode, "switched": [[0, 1, 2, 3, 1]], "shares": shares}
    expected = served(loaded(checkpoint), checkpoint, **how)
    graphs = DecodeGraphs(max_rows=4, new_capture=again)
    captured = served(loaded(checkpoint, graphs=graphs), checkpoint, **how)
    assert captured[1] == expected[1]
    for ours, theirs in zip(captured[0], expected[0], strict=True):
        assert torch.equal(ours, theirs)
    kinds = dict.fromkeys(of_layout is not None for of_layout in shares)
    assert [key[:2] for key in graphs._graphs] == [((4,), uneven) for uneven in kinds]


def test_a_cut_changes_logits_by_no_more_than_rounding_and_no_load(checkpoint):
    whole, cut = (
        served(loaded(checkpoint), checkpoint, switched=SECOND, is_cut=is_cut)
        for is_cut in (False, True)
    )
    assert cut[1] == whole[1]
    for ours, theirs in zip(cut[0], whole[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_captured_steps_in_two_micro_batches_are_the_eager_ones(checkpoint):
    decode = [(([5, 9], [n]), ([7], [n + 1]), ([1, 2, 3], [n + 2])) for n in range(4)]
    how = {"steps": [(), *STEPS, *decode], "switched": SECOND, "is_cut": True}
    expected = served(loaded(checkpoint), checkpoint, **how)
    graphs = DecodeGraphs(max_rows=8, new_capture=again)
    captured = served(loaded(checkpoint, graphs=graphs), checkpoint, **how)
    assert captured[1] == expected[1]
    for ours, theirs in zip(captured[0], expected[0], strict=True):
        assert torch.equal(ours, theirs)
    # Graphs of two sizes each.
    assert {len(rows) for rows, *_ in graphs._graphs} == {2}


def test_graphs_of_a_new_exchange_are_not_captured_into_the_memory_of_those_before():
    captured = []

    def new_capture():
        captured.append(0)

        def capture(work):
            captured[-1] += 1
            return work

        return capture

    graphs, cache = DecodeGraphs(max_rows=2, new_capture=new_capture), cache_of()
    experts = ExpertParallel.local(NARROW)
    first, second = (SimpleNamespace(check=lambda: None) for _ in range(2))
    for exchange, rows in ((first, STEPS[1]), (first, STEPS[1][:1]), (second, STEPS[1])):
        step = replace(experts.begin_step(num_tokens=len(rows)), exchange=exchange)
        here = MicroBatch(rows=_rows_of(batch(rows), cache), experts=step)
        hidden = graphs.run(lambda parts, _: parts[0].rows.tokens_T.clone(), [here], cache, step)
        assert hidden.tolist() == batch(rows).tokens_T.tolist()
    # Torch would refuse, if anything still held a tensor of the first graphs.
    assert captured == [2, 1]


def test_steps_without_rows_or_with_too_many_are_not_captured(checkpoint):
    graphs = DecodeGraphs(max_rows=2, new_capture=again)
    model = loaded(checkpoint, graphs=graphs)
    logits, _ = served(model, checkpoint, steps=[(), STEPS[0]])
    assert logits[0].shape == (0, 64)
    assert graphs._graphs == {}
    assert sizes(1) == (1,)
    assert sizes(20) == (1, 2, 4, 8, 16, 20)


def cache_of_wide(*, fp8, block_tokens=16):
    return LatentCache(
        WIDE, num_blocks=8, max_len=64, dtype=torch.bfloat16, fp8=fp8, block_tokens=block_tokens
    )


@pytest.fixture
def serve_wide(random_model, tmp_path):
    """Logits of each step of a model whose latents can be in FP8, from a cache of one's choice."""
    save(random_model(WIDE), tmp_path / "wide", fp8=Fp8Config())
    wide = Checkpoint.open(tmp_path / "wide", keep_fp8=True)

    def serve(cache, *, graphs=None):
        model, experts = loaded(wide, graphs=graphs), ExpertParallel.local(WIDE, placement(FIRST))
        return [model.step(batch(step), cache, experts).logits_SV.float() for step in STEPS]

    return serve


def test_latents_in_fp8_change_logits_by_no_more_than_fp8_does(serve_wide):
    plain, quantized = (serve_wide(cache_of_wide(fp8=fp8)) for fp8 in (False, True))
    for ours, theirs in zip(quantized, plain, strict=True):
        assert 0 < difference(ours, theirs) < 1e-2


def test_captured_steps_on_latents_in_fp8_are_the_eager_ones(serve_wide):
    eager = serve_wide(cache_of_wide(fp8=True))
    graphs = DecodeGraphs(max_rows=8, new_capture=again)
    captured = serve_wide(cache_of_wide(fp8=True), graphs=graphs)
    assert all(map(torch.equal, captured, eager))
    assert len(graphs._graphs) == 2


@pytest.mark.parametrize("fp8", [False, True])
def test_how_many_positions_a_block_has_changes_no_token(serve_wide, fp8):
    small, large = (serve_wide(cache_of_wide(fp8=fp8, block_tokens=tokens)) for tokens in (16, 64))
    assert all(map(torch.equal, small, large))


def test_a_latent_in_fp8_takes_little_more_than_half_the_memory():
    cache = {fp8: cache_of_wide(fp8=fp8).bytes_per_token for fp8 in (False, True)}
    # 128 + 16 numbers in each of two layers; in FP8 128 codes, a scale, and 16 numbers as before.
    assert cache == {False: 2 * 2 * 144, True: 2 * (128 + 4 + 2 * 16)}
