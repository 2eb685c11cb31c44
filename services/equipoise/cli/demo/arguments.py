"""Command lines of the demo's processes, and its prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.traffic import Prompt, prompts_of
from equipoise_model.train.data import Domain, heldout_prompts

# Pulls compete with serving for a few cores. This is about two experts of the tiny model per rank
# and step, and moves what a traffic shift needs within a second.
_PULL_MIB_PER_S = 0.5
# Windows of six seconds have few tokens, in bursts: smaller gains are mostly noise.
_MIN_GAIN = 0.02


def balancer_arguments(
    settings: DemoSettings, *, address: str, page: str, state: Path
) -> list[str]:
    """The balancer's command line."""
    return [
        "balancer",
        f"--listen={address}",
        f"--web-listen={page}",
        f"--store={state}",
        f"--interval-s={settings.interval_s}",
        f"--report-interval-s={settings.interval_s / 10}",
        # The latest window must outweigh older ones, or a shift is detected late.
        f"--fast-half-life-s={settings.interval_s / 2}",
        f"--min-gain={_MIN_GAIN}",
        # What a rank can pull, so that waves are short from the start.
        f"--bandwidth-bytes-per-s={_PULL_MIB_PER_S * 2**20:.0f}",
    ]


def worker_arguments(
    settings: DemoSettings,
    *,
    pool: str,
    worker: str,
    rank: int,
    num_ranks: int,
    slots_per_rank: int,
    balancer: str,
) -> list[str]:
    """The command line of one of a pool's workers."""
    return [
        "worker",
        f"--balancer={balancer}",
        f"--pool={pool}",
        f"--worker={worker}",
        f"--node=node-{rank * settings.nodes // num_ranks}",
        f"--checkpoint={settings.checkpoint}",
        f"--num-ranks={num_ranks}",
        f"--slots-per-rank={slots_per_rank}",
        "--batch-invariant",
        "--device=cpu",  # The ranks share this machine, and NCCL needs one GPU per rank.
        f"--pull-mib-per-s={_PULL_MIB_PER_S}",
    ]


def domain_prompts(
    settings: DemoSettings, domain: str, *, max_tokens: tuple[int, int]
) -> Sequence[Prompt]:
    """Prompts from held-out text, which the model was not trained on."""
    texts = heldout_prompts(
        cast("Domain", domain), num_prompts=settings.prompts_per_domain, seed=settings.seed
    )
    return prompts_of(domain, texts, max_tokens=max_tokens, seed=settings.seed)
