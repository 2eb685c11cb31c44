"""Writes the values of DeepSeek-V3's deployment units, from `planning/units.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.planning.units import NUM_EXPERTS, UNITS, Unit, UnitName
from equipoise_model.latent_cache import KERNEL_BLOCK_TOKENS, blocks_for
from equipoise_model.memory import GIB, RankSizes, plan_memory
from equipoise_model.presets import DEEPSEEK_V3

CHART = Path(__file__).parent / "equipoise"
GPU_GIB = 78
SPARE_SLOTS = 2  # The chart's default.
CONTEXT = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    """What the values of a unit have beyond its ranks and slots."""

    head: str
    """The values of the pool and its balancer."""

    cache_tokens: int
    """Tokens that a rank's latent cache has room for."""

    max_requests: int
    """Requests of a rank at a time."""

    max_step_tokens: int
    """Tokens of a rank's step."""

    host_gib: tuple[int, int]
    """Host memory requested, and its limit."""


def written() -> Mapping[Path, str]:
    """The text of each file."""
    return {
        CHART / f"values-deepseek-v3-{name}.yaml": _values(name, release)
        for name, release in _RELEASES.items()
    }


def _values(name: UnitName, release: _Release) -> str:
    unit = UNITS[name]
    needed = round(_needed_bytes(unit, release) / GIB)
    request, limit = release.host_gib
    return f"""\
# DeepSeek-V3 or R1 in FP8, unit {name} on {unit.num_ranks} H100, {unit.num_nodes} machines of 8: \
`equipoise worker --explain` shows {needed} of {GPU_GIB} GiB per GPU.
# Change checkpoint.path, the claim and the network. Written by helm/unit_values.py.
{release.head}worker:
  replicas: {unit.num_ranks}
  slotsPerRank: {unit.slots_per_rank} # {unit.num_redundant} redundant slots per layer
{_SHARED if unit.routes_shared_expert else ""}\
  numExperts: {NUM_EXPERTS}
  gpu: {{count: 1, memoryGiB: {GPU_GIB}}}
  rdma: {{resourceName: rdma/ib}}
  checkpoint:
    model: deepseek-v3
    path: /models/deepseek-v3
    volume: {{persistentVolumeClaim: {{claimName: deepseek-v3}}}}
  maxRequests: {release.max_requests}
  maxQueuedRequests: 512
  contextLength: {CONTEXT}
  cacheTokens: {release.cache_tokens}
  maxStepTokens: {release.max_step_tokens}
  startupTimeoutSeconds: 3600
  sharedMemorySize: 16Gi
  topology: {{source: nodeLabels}} # one node of plans per NVLink domain
  resources:
    requests: {{cpu: "12", memory: {request}Gi}}
    limits: {{memory: {limit}Gi}} # an epoch may bring every expert of the rank
"""


def _needed_bytes(unit: Unit, release: _Release) -> int:
    """Memory of a rank's GPU."""
    sizes = RankSizes(
        is_fp8=True,
        on_gpu=True,
        num_ranks=unit.num_ranks,
        slots_per_rank=unit.slots_per_rank,
        spare_slots=SPARE_SLOTS,
        num_blocks=blocks_for(release.cache_tokens, block_tokens=KERNEL_BLOCK_TOKENS),
        block_tokens=KERNEL_BLOCK_TOKENS,
        fp8_latents=False,
        context_length=CONTEXT,
        max_requests=release.max_requests,
        max_step_tokens=release.max_step_tokens,
        max_graph_rows=release.max_requests,
        speculate=0,
    )
    config = replace(DEEPSEEK_V3, shared_as_routed=unit.routes_shared_expert)
    return plan_memory(config, sizes).num_bytes


def _policy(name: UnitName) -> str:
    """The policy of all pools of the unit's phase."""
    unit, phase = UNITS[name], name.partition("-")[0]
    return (
        f"{{phase: {phase}, interval: {unit.interval_s:.0f}s, "
        f"planning: {{algorithm: {unit.algorithm}}}}}"
    )


_SHARED = "  sharedAsRouted: true # only GPUs with a slot for the shared expert hold it\n"

# DeepSeek's decode: 128 requests of 4,989 tokens on average.
_DECODE = _Release(
    head="""\
pool: decode
phase: decode
peerPools: [prefill]
prefillPool: prefill
balancer: {enabled: false, externalAddress: "prefill-equipoise-balancer.moe.svc:7070"}
""",
    cache_tokens=128 * 4_989,
    max_requests=128,
    max_step_tokens=128,
    host_gib=(16, 32),
)

_RELEASES: Mapping[UnitName, _Release] = {
    UnitName.PREFILL_EP32: _Release(
        head=f"""\
pool: prefill
phase: prefill
peerPools: [decode]
gateway: {{enabled: false}}
balancer:
  storage: {{persistent: true}}
policy: # of both pools: the other release uses this one's balancer
  defaults:
    waves: {{maxBytes: 2Gi}} # 48 experts of 44 MB per rank and wave
  pools:
    prefill: {_policy(UnitName.PREFILL_EP32)}
    decode: {_policy(UnitName.DECODE_EP144)}
""",
        cache_tokens=196_608,
        max_requests=64,
        max_step_tokens=1024,
        host_gib=(32, 64),
    ),
    UnitName.DECODE_EP144: _DECODE,
    UnitName.DECODE_EP320: _DECODE,
}


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")
