"""What a rank reports of its requests, cache and steps."""

from dataclasses import asdict

from equipoise.planning.node_traffic import NodeCounts
from equipoise.wire.messages import RankStats
from equipoise.worker.scheduler import Scheduler
from equipoise_model.node_traffic import NodeSpread


def rank_stats(
    scheduler: Scheduler,
    *,
    num_steps: int,
    median_step_us: int,
    busy_s: float,
    step_s: float,
    parity_tokens: int,
    nodes: NodeCounts | None,
) -> RankStats:
    """Collect the statistics of a report; the caller keeps others from the scheduler meanwhile."""
    counts, blocks, pending = scheduler.counts, scheduler.blocks, scheduler.prefill_work()
    return RankStats(
        steps=num_steps,
        tokens_processed=counts.processed,
        tokens_generated=counts.generated,
        median_step_us=median_step_us,
        active_requests=scheduler.num_active,
        queued_requests=scheduler.num_queued,
        busy_us=round(busy_s * 1e6),
        cache_tokens=blocks.num_blocks * blocks.block_tokens,
        cache_tokens_used=blocks.num_used * blocks.block_tokens,
        prefix_tokens_sought=counts.sought,
        prefix_tokens_found=counts.found,
        requests_preempted=counts.preempted,
        drafts=counts.drafted,
        drafts_accepted=counts.accepted,
        max_requests=scheduler.max_requests,
        pending_prompt_tokens=pending.tokens,
        pending_prompt_pairs=pending.pairs,
        parity_tokens=parity_tokens,
        step_us=round(step_s * 1e6),
        nodes=nodes,
        handed_over_prompts=counts.handed_over,
        handed_over_tokens=counts.handed_over_tokens,
        missing_tokens=counts.prefilled_missing,
        held_prompts=scheduler.holds.num_taken,
        held_tokens=scheduler.holds.num_tokens,
    )


def node_counts(spread: NodeSpread | None) -> NodeCounts | None:
    """Convert what the model counted, without counts of zero at the end."""
    if spread is None:
        return None
    rows = list(spread.rows_by_nodes)
    while rows and not rows[-1]:
        rows.pop()
    return NodeCounts(**{**asdict(spread), "rows_by_nodes": tuple(rows)})
