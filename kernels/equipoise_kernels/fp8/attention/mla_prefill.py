"""Attention of prompts to keys and values of their own (multi-head latent attention, expanded).

Contract: T queries in two parts, [T, H, n] and rotated [T, H, P]; N keys and values of every head
[N, H, n + v], keys first, and the keys' rotated part [N, P], the same for all heads. All are
bfloat16 or float32 with contiguous columns; n, P and v are powers of two of at least 16.

Segments, int32 [S, 6], say which queries see which keys:

    first query, queries, position of the first query, first key, keys, position of the first key

Queries and keys of a segment are consecutive, in memory and in position, and a query sees the keys
up to its own position; the others of its segment must be finite too, because they get weight 0. A
query is in one segment of a call. With s = scale * <query, key>:

    lse = log(sum over keys of exp(s))              out = sum over keys of exp(s - lse) * value

A sequence may be longer than its keys at a time: a segment whose keys begin at position 0 starts
its queries' results, and any other continues those in `out` and `lse`, of calls with all earlier
positions. Both are float32, [T, H, v] and [T, H]; rows of no segment keep their contents.

A program sees only its own segment, so a query's results do not depend on the other segments. Sums
are float32. The kernel rounds weights to the values' dtype for the second product; the twin does
not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise_kernels.errors import KernelInputError
from equipoise_kernels.formats import require
from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.attention.softmax import LOG2_E, added, closed, product
from equipoise_kernels.fp8.jit import constant, jit, tl
from equipoise_kernels.fp8.operation import KernelOperation
from equipoise_kernels.fp8.specialization import Specialization

SEGMENT_NUMBERS = 6
"""Numbers of a segment."""
QUERY_TILE = 128
"""Queries that are computed together: fewer take as long."""
LEAST_WIDTH = 16
"""Numbers that every part of a head must have, at least, and a power of two of them."""

_SEGMENT_NUMBERS = constant(SEGMENT_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaPrefillConfig:
    """Work of a program."""

    queries: int
    """Queries per program."""
    keys: int
    """Keys per step of the loop."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Depth of the software pipeline."""


CONFIG_SPACE = tuple(
    MlaPrefillConfig(queries=queries, keys=keys, num_warps=num_warps, num_stages=num_stages)
    for queries, num_warps in ((64, 4), (QUERY_TILE, 8))
    for keys in (32, 64)
    for num_stages in (3, 4)
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillInputs:
    """Queries, keys and values of a call.

    Raises:
        KernelInputError: the tensors break the contract.
    """

    plain_THn: Tensor
    """The queries' plain part; may be a view of whole queries."""
    rotary_THP: Tensor
    """The queries' rotated part."""
    keys_values_NHw: Tensor
    """Every head's keys, then its values."""
    key_rotary_NP: Tensor
    """The keys' rotated part; may be a view of whole latents."""
    segments_S6: Tensor
    """Which queries see which keys; trusted."""
    most_queries: int
    """Queries of the largest segment."""

    def __post_init__(self) -> None:
        plain, keys = self.plain_THn, self.keys_values_NHw
        require("plain", plain, torch.bfloat16, torch.float32, dense=True)
        if plain.dim() != 3 or keys.dim() != 3 or plain.shape[1] == 0:
            raise KernelInputError(
                f"queries and keys must be [.., H, columns], not {list(plain.shape)} and "
                f"{list(keys.shape)}"
            )
        num_heads, num_keys = plain.shape[1], keys.shape[0]
        require("keys", keys, plain.dtype, dense=True, like=plain)
        require("keys", keys, shape=(num_keys, num_heads, keys.shape[2]))
        require("rotary", self.rotary_THP, plain.dtype, dense=True, like=plain)
        require("rotary", self.rotary_THP, shape=(*plain.shape[:2], self.rotary))
        require("key_rotary", self.key_rotary_NP, plain.dtype, dense=True, like=plain)
        require("key_rotary", self.key_rotary_NP, shape=(num_keys, self.rotary))
        shape = (len(self.segments_S6), SEGMENT_NUMBERS)
        require("segments", self.segments_S6, torch.int32, shape=shape, contiguous=True, like=plain)
        for name, width in (("plain", self.plain), ("rotated", self.rotary), ("value", self.value)):
            if width < LEAST_WIDTH or width & (width - 1):
                raise KernelInputError(
                    f"heads must have a power of two of {name} numbers, at least {LEAST_WIDTH}, "
                    f"not {width}"
                )

    @property
    def plain(self) -> int:
        """n: numbers of the plain part."""
        return self.plain_THn.shape[2]

    @property
    def rotary(self) -> int:
        """P: numbers of the rotated part."""
        return self.rotary_THP.shape[2]

    @property
    def value(self) -> int:
        """v: numbers of a value."""
        return self.keys_values_NHw.shape[2] - self.plain


def mla_prefill(inputs: PrefillInputs, *, scale: float, out_THv: Tensor, lse_TH: Tensor) -> None:
    """Attend with the backend selected for this process; writes to `out_THv` and `lse_TH`.

    Raises:
        KernelInputError: the outputs do not match the inputs.
    """
    plain = inputs.plain_THn
    shape = (*plain.shape[:2], inputs.value)
    require("out", out_THv, torch.float32, shape=shape, contiguous=True, like=plain)
    require("lse", lse_TH, torch.float32, shape=shape[:2], contiguous=True, like=plain)
    if inputs.most_queries > 0:
        MLA_PREFILL.on(plain.device)(inputs, scale=scale, out_THv=out_THv, lse_TH=lse_TH)


def mla_prefill_reference(
    inputs: PrefillInputs, *, scale: float, out_THv: Tensor, lse_TH: Tensor
) -> None:
    """The torch twin: float32, all keys of a segment at once."""
    for segment in inputs.segments_S6.tolist():
        first_query, num_queries, position, first_key, num_keys, key_position = segment
        queries = slice(first_query, first_query + num_queries)
        keys = slice(first_key, first_key + num_keys)
        query_HQq = torch.cat([inputs.plain_THn[queries], inputs.rotary_THP[queries]], dim=2)
        key_HKn, value_HKv = (
            inputs.keys_values_NHw[keys].float().transpose(0, 1)
            .split([inputs.plain, inputs.value], dim=2)
        )  # fmt: skip
        rotary_HKP = inputs.key_rotary_NP[keys].float().expand(len(key_HKn), -1, -1)
        key_HKq = torch.cat([key_HKn, rotary_HKP], dim=2)
        scores_HQK = query_HQq.float().transpose(0, 1) @ key_HKq.transpose(1, 2) * scale
        own_Q = torch.arange(num_queries, device=scores_HQK.device) + position
        theirs_K = torch.arange(num_keys, device=scores_HQK.device) + key_position
        scores_HQK.masked_fill_(theirs_K > own_Q[:, None], float("-inf"))
        lse_HQ = scores_HQK.logsumexp(dim=2)
        if key_position > 0:
            lse_HQ = torch.logaddexp(lse_HQ, lse_TH[queries].T)
        out_HQv = (scores_HQK - lse_HQ[..., None]).exp() @ value_HKv
        if key_position > 0:
            fading_HQ1 = (lse_TH[queries].T - lse_HQ)[..., None].exp()
            out_HQv += out_THv[queries].transpose(0, 1) * fading_HQ1
        out_THv[queries] = out_HQv.transpose(0, 1)
        lse_TH[queries] = lse_HQ.T


def mla_prefill_triton(
    inputs: PrefillInputs,
    *,
    scale: float,
    out_THv: Tensor,
    lse_TH: Tensor,
    config: MlaPrefillConfig | None = None,
) -> None:
    """Launch the kernel, with the committed configuration of this device by default."""
    num_heads, keys = inputs.plain_THn.shape[1], inputs.keys_values_NHw
    config = config or MLA_PREFILL.config(rows=inputs.most_queries)
    num_tiles = -(-inputs.most_queries // config.queries)
    mla_prefill_kernel[(num_tiles, num_heads, len(inputs.segments_S6))](
        inputs.plain_THn,
        inputs.rotary_THP,
        keys,
        inputs.key_rotary_NP,
        inputs.segments_S6,
        out_THv,
        lse_TH,
        scale,
        inputs.plain_THn.stride(0),
        inputs.plain_THn.stride(1),
        inputs.rotary_THP.stride(0),
        inputs.rotary_THP.stride(1),
        keys.stride(0),
        keys.stride(1),
        inputs.key_rotary_NP.stride(0),
        PLAIN=inputs.plain,
        ROTARY=inputs.rotary,
        VALUE=inputs.value,
        **configurations.options(config),
    )


@jit
def mla_prefill_kernel(
    plain_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    key_rotary_ptr: tl.tensor,
    segments_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale: float,
    token_stride: int,
    head_stride: int,
    rotary_token_stride: int,
    rotary_head_stride: int,
    key_stride: int,
    key_head_stride: int,
    key_rotary_stride: int,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """Each program computes a tile of a segment's queries for one head; late tiles come first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head = tl.program_id(1)
    segment_ptr = segments_ptr + tl.program_id(2) * _SEGMENT_NUMBERS
    num_queries, position = tl.load(segment_ptr + 1), tl.load(segment_ptr + 2)
    num_keys, key_position = tl.load(segment_ptr + 4), tl.load(segment_ptr + 5)
    queries = first + tl.arange(0, QUERIES)
    is_query = queries < num_queries
    # Rows beyond the last query repeat it, so that every row sees a key before it sees none.
    positions = position + tl.minimum(queries, num_queries - 1)
    last = position + tl.minimum(first + QUERIES, num_queries) - 1
    num_seen = tl.where(first < num_queries, tl.minimum(num_keys, last + 1 - key_position), 0)

    tokens = tl.load(segment_ptr).to(tl.int64) + queries
    q = _rows(plain_ptr + tokens * token_stride + head * head_stride, is_query, PLAIN)
    rotary_ptr += head * rotary_head_stride
    q_rotary = _rows(rotary_ptr + tokens * rotary_token_stride, is_query, ROTARY)
    sums = tokens * tl.num_programs(1) + head
    out_ptrs = out_ptr + sums[:, None] * VALUE + tl.arange(0, VALUE)[None, :]
    continues = is_query & (key_position > 0) & (num_seen > 0)
    largest = tl.load(lse_ptr + sums, mask=continues, other=float("-inf")) * LOG2_E
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    acc = tl.load(out_ptrs, mask=continues[:, None], other=0.0)

    first_key = tl.load(segment_ptr + 3).to(tl.int64)
    scale *= LOG2_E
    keys_ptr += head * key_head_stride
    for start in tl.range(0, num_seen, KEYS, num_stages=NUM_STAGES):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < num_seen
        starts = keys_ptr + (first_key + keys) * key_stride
        k = _rows(starts, is_key, PLAIN)
        values = _rows(starts + PLAIN, is_key, VALUE)
        starts = key_rotary_ptr + (first_key + keys) * key_rotary_stride
        k_rotary = _rows(starts, is_key, ROTARY)
        scores = product(q, tl.trans(k)) + product(q_rotary, tl.trans(k_rotary))
        is_seen = is_key[None, :] & (key_position + keys[None, :] <= positions[:, None])
        scores = tl.where(is_seen, scores * scale, float("-inf"))
        largest, total, acc = added(largest, total, acc, scores, values)
    divisor, lse = closed(largest, total)
    is_written = is_query & (num_seen > 0)
    tl.store(out_ptrs, acc / divisor[:, None], mask=is_written[:, None])
    tl.store(lse_ptr + sums, lse, mask=is_written)


@jit
def _rows(starts: tl.tensor, is_read: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load rows [rows, WIDTH] at pointers [rows]; zeros where `is_read` is false."""
    ptrs = starts[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(ptrs, mask=is_read[:, None], other=0.0)


def specializations(
    config: MlaPrefillConfig, *, plain: int, rotary: int, value: int
) -> list[Specialization]:
    """Specialisations of a configuration."""
    return [
        Specialization(
            kernel=mla_prefill_kernel,
            name=f"mla_prefill {config}",
            types={
                "plain_ptr rotary_ptr keys_ptr key_rotary_ptr": "*bf16",
                "segments_ptr": "*i32",
                "out_ptr lse_ptr": "*fp32",
                "scale": "fp32",
            },
            multiples_of_16="token_stride head_stride rotary_token_stride rotary_head_stride "
            "key_stride key_head_stride key_rotary_stride",
            options=configurations.options(config)
            | {"PLAIN": plain, "ROTARY": rotary, "VALUE": value},
            is_product=True,
            has_wide_products=True,
        )
    ]


MLA_PREFILL = KernelOperation(
    name="mla_prefill",
    backends={"reference": mla_prefill_reference, "triton": mla_prefill_triton},
    configs=CONFIG_SPACE,
    specializations=specializations,
)
