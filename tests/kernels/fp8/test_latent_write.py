import pytest
import torch

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.fp8.attention.latent_write import (
    LatentWriteConfig,
    latent_write,
    latent_write_reference,
    latent_write_triton,
)
from equipoise_kernels.fp8.attention.latents import PlainLatents, QuantizedLatents
from equipoise_kernels.fp8.testing.cases import spread_normal
from tests.support.guarded_tensors import guarded

RANK, ROTARY, BLOCK, NUM_BLOCKS, HEADS = 256, 16, 4, 3, 5
EPS = 1e-6
CONFIG = LatentWriteConfig(heads=4, num_warps=4)
RUNS = ((latent_write_reference, {}), (latent_write_triton, {"config": CONFIG}))
FP8 = torch.float8_e4m3fn
# In any order, the last position of the cache, one of padding.
PLACES = torch.tensor([6, NUM_BLOCKS * BLOCK - 1, -1, 0])


class Cache:
    """Poisoned latents of one kind, with guards around all that may be written."""

    def __init__(self, kind):
        if kind is FP8:
            shapes = {FP8: RANK, torch.float32: RANK // 128, torch.bfloat16: ROTARY}
        else:
            shapes = {kind: RANK + ROTARY}
        self.guards = [guarded((NUM_BLOCKS, BLOCK, width), dtype, column_guard=64)
                       for dtype, width in shapes.items()]  # fmt: skip
        views = [guard.view for guard in self.guards]
        self.latents = (
            QuantizedLatents(codes_BPR=views[0], scales_BPG=views[1], rotary_BPP=views[2])
            if kind is FP8
            else PlainLatents(latents_BPC=views[0], rank=RANK)
        )

    def at(self, places):
        """Values [N, R + P] at places, float32."""
        return self.latents.values().flatten(0, 1)[places]

    def written(self):
        """The places without poison, if all others are entirely poison."""
        is_poison = torch.cat([guard.unwritten() for guard in self.guards], dim=-1).flatten(0, 1)
        assert (is_poison.all(dim=1) | ~is_poison.any(dim=1)).all()
        assert all(guard.guard_is_intact() for guard in self.guards)
        return (~is_poison[:, 0]).nonzero().flatten().tolist()


def tokens(generator, dtype=torch.bfloat16, num_tokens=4):
    """Inputs as a model has them: views of wider tensors, tables with YaRN's factor."""
    raw = spread_normal((num_tokens, RANK + ROTARY), generator, dtype=dtype)
    queries = torch.randn(num_tokens, HEADS, 3 * ROTARY, generator=generator).to(dtype)
    angles = 7 * torch.randn(num_tokens, ROTARY // 2, generator=generator)
    return {
        "raw_TC": raw.clamp(-100, 100),
        "query_THP": queries[..., 2 * ROTARY :],
        "places_T": PLACES[:num_tokens],
        "weight_R": (1 + torch.rand(RANK, generator=generator)).to(dtype),
        "eps": EPS,
        "cos_TF": 1.2 * angles.cos(),
        "sin_TF": 1.2 * angles.sin(),
    }


def run(function, cache, given, **options):
    """Rotated queries, written into the last columns of wider ones that stay as they were."""
    num_tokens = len(given["raw_TC"])
    guard = guarded((num_tokens, HEADS, ROTARY), given["raw_TC"].dtype)
    given = dict(given)
    raw, query = given.pop("raw_TC"), given.pop("query_THP")
    function(raw, query, cache.latents, **given, out_THP=guard.view, **options)
    assert guard.guard_is_intact()
    return guard.view


def exact(given):
    """The contract in float64, without roundings: latents [T, R + P], queries [T, H, P]."""
    raw = given["raw_TC"].double()
    compressed = raw[:, :RANK]
    mean = (compressed * compressed).mean(dim=1, keepdim=True)
    normed = compressed / (mean + EPS).sqrt() * given["weight_R"].double()
    angle = torch.complex(given["cos_TF"].double(), given["sin_TF"].double())

    def turned(x, angle):
        pairs = torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2)))
        return torch.cat([(pairs * angle).real, (pairs * angle).imag], dim=-1)

    latents = torch.cat([normed, turned(raw[:, RANK:], angle)], dim=1)
    return latents, turned(given["query_THP"], angle[:, None])


@pytest.mark.parametrize(("function", "options"), RUNS)
def test_float32_results_match_float64(function, options, generator, interpreted):
    cache, given = Cache(torch.float32), tokens(generator, torch.float32)
    queries = run(function, cache, given, **options)
    latents, rotated = exact(given)
    kept = PLACES >= 0
    close = {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(cache.at(PLACES[kept]).double(), latents[kept], **close)
    torch.testing.assert_close(queries.double(), rotated, **close)
    assert cache.written() == sorted(PLACES[kept].tolist())


@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
def test_the_kernel_rounds_as_the_reference_does(kind, generator, interpreted):
    given, outcomes = tokens(generator), []
    for function, options in RUNS:
        cache = Cache(kind)
        queries = run(function, cache, given, **options)
        assert cache.written() == [0, 6, 11]
        outcomes.append((cache.at([0, 6, 11]), queries))
    (twin, twin_queries), (kernel, kernel_queries) = outcomes
    assert torch.equal(kernel_queries, twin_queries)
    assert torch.equal(kernel[:, RANK:], twin[:, RANK:])
    # Squares are summed in another order: seldom a last bit, which seldom moves a code.
    apart = kernel != twin
    assert apart.float().mean() < 0.01
    torch.testing.assert_close(kernel, twin, rtol=2**-7 if kind is not FP8 else 2**-3, atol=1e-2)


def test_fp8_latents_are_the_normed_ones_within_half_a_code(generator, interpreted):
    given, cache = tokens(generator), Cache(FP8)
    run(latent_write_reference, cache, given)
    latents, _ = exact(given)
    scales = cache.latents.scales_BPG.flatten(0, 1)[PLACES[0]].repeat_interleave(128)
    wanted, seen = latents[0, :RANK], cache.at(PLACES[:1])[0, :RANK].double()
    # Half a step of a code, and two roundings to bfloat16 before and one after it.
    allowed = wanted.abs() * (1 / 16 + 3 / 256) + scales / 1024
    assert ((seen - wanted).abs() <= allowed * 1.01).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, FP8])
@pytest.mark.parametrize("place", [-2, NUM_BLOCKS * BLOCK, 2**40, -(2**40)])
def test_a_place_that_does_not_exist_is_not_written_and_shows_in_its_queries_only(
    place, kind, generator, interpreted
):
    given = tokens(generator, num_tokens=2)
    given["places_T"] = torch.tensor([place, 3])
    for function, options in RUNS:
        cache = Cache(kind)
        queries = run(function, cache, given, **options)
        assert cache.written() == [3]
        assert queries[0].isnan().all()
        assert not queries[1].isnan().any()


def test_a_token_gets_the_same_bits_whatever_it_is_batched_with(generator, interpreted):
    given, outcomes = tokens(generator), []
    for count in (4, 1):
        part = {k: v[:count] if k.endswith(("_TC", "_THP", "_T", "_TF")) else v
                for k, v in given.items()}  # fmt: skip
        cache = Cache(torch.bfloat16)
        queries = run(latent_write_triton, cache, part, config=CONFIG)
        outcomes.append((cache.at(PLACES[:1]), queries[:1].clone()))
    for together, alone in zip(*outcomes, strict=True):
        assert torch.equal(together, alone)


def test_no_tokens_are_written_nowhere(generator, interpreted):
    given, cache = tokens(generator, num_tokens=0), Cache(torch.bfloat16)
    latent_write(given.pop("raw_TC"), given.pop("query_THP"), cache.latents, **given)
    run(latent_write_triton, cache, tokens(generator, num_tokens=0))
    assert cache.written() == []


def test_rotated_queries_are_new_where_none_are_given(generator):
    given, cache = tokens(generator), Cache(torch.bfloat16)
    wanted = run(latent_write_reference, cache, given)
    seen = latent_write(given.pop("raw_TC"), given.pop("query_THP"), cache.latents, **given)
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"raw_TC": torch.zeros(4, RANK + ROTARY).half()}, "raw must be bfloat16"),
        ({"raw_TC": torch.zeros(4, RANK).bfloat16()}, r"raw must be \[4, 272\]"),
        ({"raw_TC": torch.zeros(4, 2 * (RANK + ROTARY)).bfloat16()[:, ::2]}, "neighbouring"),
        ({"query_THP": torch.zeros(4, ROTARY).bfloat16()}, r"query must be \[T, H, P\]"),
        ({"query_THP": torch.zeros(4, HEADS, ROTARY)}, "query must be bfloat16"),
        ({"query_THP": torch.zeros(4, HEADS, 8).bfloat16()}, r"query must be \[4, 5, 16\]"),
        ({"out_THP": torch.zeros(4, HEADS, 8).bfloat16()}, r"out must be \[4, 5, 16\]"),
        ({"out_THP": torch.zeros(4, HEADS, ROTARY)}, "out must be bfloat16"),
        ({"places_T": PLACES.int()}, "places must be int64"),
        ({"places_T": PLACES[:3]}, r"places must be \[4\]"),
        ({"places_T": torch.arange(8)[::2]}, "places must be contiguous"),
        ({"weight_R": torch.zeros(RANK)}, "weight must be bfloat16"),
        ({"weight_R": torch.zeros(ROTARY).bfloat16()}, r"weight must be \[256\]"),
        ({"cos_TF": torch.zeros(4, ROTARY)}, r"cos must be \[4, 8\]"),
        ({"sin_TF": torch.zeros(4, ROTARY // 2).bfloat16()}, "sin must be float32"),
    ],
)
def test_inputs_that_break_the_contract_are_rejected_by_name(change, named, generator):
    cache, given = Cache(torch.bfloat16), tokens(generator) | change
    raw, query = given.pop("raw_TC"), given.pop("query_THP")
    with pytest.raises(KernelInputError, match=named):
        latent_write(raw, query, cache.latents, **given)
    assert cache.written() == []


def test_latents_of_another_dtype_than_the_tokens_are_rejected(generator):
    cache, given = Cache(torch.float32), tokens(generator)
    with pytest.raises(KernelInputError, match="latents must be bfloat16"):
        latent_write(given.pop("raw_TC"), given.pop("query_THP"), cache.latents, **given)
