"""Long chunks of prompts in the expanded form: when it pays, which rows and keys, and results."""

import warnings
from dataclasses import replace

import pytest
import torch

from equipoise_kernels.numerics import difference
from equipoise_model.checkpoint import Checkpoint, save
from equipoise_model.config import Fp8Config
from equipoise_model.dispatch import ExpertParallel
from equipoise_model.fp8 import attention, prefill
from equipoise_model.fp8.graphs import DecodeGraphs
from equipoise_model.fp8.prefill import expanded_rows, expands, stretch_bytes
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.latent_cache import LatentCache
from equipoise_model.placement import PlacementTables
from equipoise_model.presets import DEEPSEEK_V2_LITE_SIZED, DEEPSEEK_V3
from equipoise_model.step import StepBatch
from tests.support.fp8_models import NARROW, WIDE
from tests.support.kernel_backends import use_backends

LAYOUT = [[0, 1, 2, 3]]


def fewest(config, before, most=4096):
    """Queries behind a prefix from which the expanded form always pays."""
    never = [
        count
        for count in range(1, most)
        if not expands(config, num_queries=count, num_positions=before + count)
    ]
    return never[-1] + 1


def test_in_deepseeks_sizes_the_limit_follows_from_operations_then_from_bytes():
    # R (n + v) / (C + R - q - v) multiplications, moved by tiles of 128 and by keys' bytes.
    by_operations = 512 * 256 / (576 + 512 - 192 - 128)
    assert by_operations == pytest.approx(170.7, abs=0.1)
    for before in (2048, 16384, 100_000):
        assert by_operations < fewest(DEEPSEEK_V3, before) < 256
    # A prompt from its start has fewer multiplications in any case: launches decide.
    assert 256 < fewest(DEEPSEEK_V3, 0) < 384
    # With 16 heads, the absorbed form computes 64, and rebuilding costs an eighth.
    assert fewest(DEEPSEEK_V2_LITE_SIZED, 16384) < 96


def test_decode_and_drafts_stay_absorbed():
    for count in (1, 2, 5, 64, 128):
        for before in (0, 1000, 100_000):
            sizes = {"num_queries": count, "num_positions": before + count}
            assert not expands(DEEPSEEK_V3, **sizes)


def test_a_prompt_of_four_thousand_takes_less_than_half_the_time():
    sizes = {"num_queries": 4096, "num_positions": 4096}
    assert prefill._expanded_s(DEEPSEEK_V3, **sizes) < 0.5 * prefill._absorbed_s(
        DEEPSEEK_V3, **sizes
    )


@pytest.mark.parametrize("name", ["qk_nope_head_dim", "v_head_dim"])
@pytest.mark.parametrize("width", [96, 8])
def test_heads_that_the_kernel_does_not_support_stay_absorbed(name, width):
    odd = replace(DEEPSEEK_V3, **{name: width})
    assert not expands(odd, num_queries=4096, num_positions=4096)
    assert stretch_bytes(odd, num_queries=4096, num_positions=4096) == 0


def test_the_memory_of_rebuilt_keys_is_bounded():
    sizes = {"num_queries": 4096, "num_positions": 100_000}
    whole = 4096 * (576 + 128 * 256) * 2
    assert stretch_bytes(DEEPSEEK_V3, **sizes) == whole
    assert stretch_bytes(DEEPSEEK_V3, num_queries=512, num_positions=512) == whole // 8
    assert stretch_bytes(DEEPSEEK_V3, num_queries=8, num_positions=512) == 0


def batch(chunks):
    """A step of (sequence, position, tokens) in order; logits of all rows."""
    tokens, positions, sequences = [], [], []
    for sequence, position, new in chunks:
        tokens += new
        positions += range(position, position + len(new))
        sequences += [sequence] * len(new)
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        sequences_T=torch.tensor(sequences, dtype=torch.int64),
        block_tables=[[3, 1], [0, 4], [5, 2]],
        sample_rows_S=torch.arange(len(tokens)),
    )


@pytest.fixture
def several(monkeypatch):
    """Chunks of several rows expand, over keys of at most 7 positions at a time."""
    monkeypatch.setattr(prefill, "expands", lambda config, num_queries, **_: num_queries > 1)
    monkeypatch.setattr(prefill, "STRETCH", 7)


def test_every_row_sees_its_positions_once_in_order(several):
    given = batch([(2, 4, [1]), (0, 0, [2] * 20), (1, 9, [3] * 4), (0, 30, [5])])
    planned = expanded_rows(given, config=NARROW, block_tokens=16)
    assert planned.absorbed_A.tolist() == [0, 25]
    seen = {row: [] for row in range(26)}
    for stretch in planned.stretches:
        assert 0 < len(stretch.places_N) <= 7
        ends = []
        for first, count, position, key, keys, start in stretch.segments_S6.tolist():
            assert start % 7 == 0
            assert count <= stretch.most_queries
            ends.append((first, key, key + keys))
            for row in range(first, first + count):
                assert int(given.positions_T[row]) == position + row - first
                visible = range(start, min(start + keys, position + row - first + 1))
                table = given.block_tables[int(given.sequences_T[row])]
                places = stretch.places_N[key : key + len(visible)].tolist()
                assert places == [table[p // 16] * 16 + p % 16 for p in visible]
                seen[row] += visible
        # Nothing twice in a launch: a query's later stretches continue its earlier ones.
        assert len({first for first, _, _ in ends}) == len(ends)
        assert [key for _, key, _ in ends] == [0, *(end for _, _, end in ends[:-1])]
    for row, positions in seen.items():
        wanted = [] if row in (0, 25) else [*range(int(given.positions_T[row]) + 1)]
        assert positions == wanted


def test_stretches_of_a_sequence_do_not_depend_on_the_others(several):
    def starts(chunks, row):
        planned = expanded_rows(batch(chunks), config=NARROW, block_tokens=16)
        parts = [part for one in planned.stretches for part in one.segments_S6.tolist()]
        return [(part[4], part[5]) for part in parts if part[0] == row]

    alone = starts([(0, 3, [2] * 15)], 0)
    assert alone == [(7, 0), (7, 7), (4, 14)]
    assert starts([(1, 0, [7] * 3), (0, 3, [2] * 15), (2, 0, [7] * 9)], 3) == alone


def test_a_step_without_long_chunks_has_no_plan():
    given = batch([(0, 0, [2] * 20)])
    assert expanded_rows(given, config=NARROW, block_tokens=16) is None
    empty = batch([])
    assert expanded_rows(empty, config=NARROW, block_tokens=16) is None


STEPS = (
    [(0, 0, [*range(1, 19)]), (1, 0, [11, 3, 5])],
    # A prompt that continues a cached prefix, beside a token of another sequence.
    [(1, 3, [60]), (0, 18, [*range(30, 39)]), (2, 0, [9, 9, 4])],
    [(0, 27, [7]), (1, 4, [8])],
)


def served(config, path, *, graphs=None, fp8_latents=False):
    checkpoint = Checkpoint.open(path, keep_fp8=True)
    model = Fp8Transformer(checkpoint.config, num_slots=4, num_spare=0, graphs=graphs)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, LAYOUT)
    placement = PlacementTables.from_layout(LAYOUT, num_experts=4, generation=1)
    experts = ExpertParallel.local(config, placement)
    cache = LatentCache(config, num_blocks=8, max_len=64, dtype=torch.bfloat16, fp8=fp8_latents)
    return [model.step(batch(step), cache, experts).logits_SV.float() for step in STEPS]


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    use_backends(monkeypatch, "reference")


@pytest.fixture(params=[False, True], ids=["bf16", "fp8"])
def stored(request, random_model, tmp_path):
    """A checkpoint, and whether latents are in FP8."""
    config = WIDE if request.param else NARROW
    save(random_model(config), tmp_path / "fp8", fp8=Fp8Config())
    return config, tmp_path / "fp8", request.param


def close(ours, theirs):
    """Whether all rows but one are; a tie between experts may fall either way."""
    pairs = zip(torch.cat(ours), torch.cat(theirs), strict=True)
    return sum(difference(one, other) > 1e-2 for one, other in pairs) <= 1


def test_expanded_rows_match_absorbed_ones_and_the_float32_model(stored, several, monkeypatch):
    config, path, is_fp8 = stored
    expanded = served(config, path, fp8_latents=is_fp8)
    monkeypatch.setattr(prefill, "expands", lambda config, **_: False)
    absorbed = served(config, path, fp8_latents=is_fp8)
    assert close(expanded, absorbed)
    assert not torch.equal(expanded[0], absorbed[0])
    plain, experts = Checkpoint.open(path).load_model(), ExpertParallel.local(config)
    cache = LatentCache(config, num_blocks=8, max_len=64)
    exact = [plain.step(batch(step), cache, experts).logits_SV for step in STEPS]
    for ours, theirs, right in zip(expanded, absorbed, exact, strict=True):
        assert difference(ours, right) < 1.25 * difference(theirs, right)


def test_the_interpreted_kernel_matches_its_twin(stored, several, monkeypatch):
    pytest.importorskip("triton", reason="kernels need the extra `kernels`")
    from equipoise_kernels.fp8.testing.interpreter import corrected_casts

    config, path, is_fp8 = stored
    expected = served(config, path, fp8_latents=is_fp8)
    use_backends(monkeypatch, "reference,mla_prefill=triton")
    with corrected_casts(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Conversion of an array with ndim > 0", DeprecationWarning
        )
        assert close(served(config, path, fp8_latents=is_fp8), expected)


def test_captured_steps_are_absorbed(stored, several, monkeypatch):
    config, path, is_fp8 = stored

    def refused(*_arguments, **_options):
        raise AssertionError("a captured step must launch the same kernels for all chunks")

    monkeypatch.setattr(attention, "mla_prefill", refused)
    graphs = DecodeGraphs(max_rows=32, new_capture=lambda: lambda work: work)
    served(config, path, graphs=graphs, fp8_latents=is_fp8)
    with pytest.raises(AssertionError, match="captured"):
        served(config, path, fp8_latents=is_fp8)
