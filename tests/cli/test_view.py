import io
import math

import pytest
from rich.console import Console

from equipoise.cli.live.balance import sparkline, window_marks
from equipoise.cli.live.pools import pools_view
from equipoise.cli.live.ranks import RateMeter, balance_style, format_duration, load_bar
from equipoise.cli.live.view import pool_view, status_line
from equipoise.settings.numbers import format_bytes
from equipoise_api.v1 import status_pb2 as pb


def printed(renderable, *, width=100, height=25):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def a_pool():
    status = pb.PoolStatus(
        pool="decode",
        health=pb.POOL_HEALTH_SERVING,
        epoch=2,
        generation=7,
        balancedness=0.934,
        balancedness_min_layer=0.881,
        window_assignments=43_210,
        windows_closed=12,
        interval_s=4,
        rollouts_completed=3,
        rollouts_aborted=1,
    )
    status.model.num_layers, status.model.num_experts = 4, 32
    for rank, share in enumerate((0.26, 0.31, 0.19, 0.24)):
        status.ranks.add(
            rank=rank,
            worker=f"worker-{rank}",
            node=f"node-{rank // 2}",
            state="connected",
            generation=7,
            load_share=share,
            tokens_processed=1_000 * (rank + 1),
            median_step_us=12_100,
            active_requests=8,
            queued_requests=rank,
        )
    for balancedness, assignments in ((0.95, 9), (1.0, 0), (0.6, 9), (0.94, 9)):
        status.windows.add(balancedness=balancedness, assignments=assignments, generation=7)
    return status


def test_ranks_whose_layers_share_places_show_how_many_are_filled():
    status = a_pool()
    assert "places" not in printed(pool_view(status))
    for rank, places in zip(status.ranks, (44, 44, 36, 52), strict=True):
        rank.num_places, rank.used_places = places, places - 1
    text = printed(pool_view(status))
    assert "places" in text
    assert all(f"{places - 1}/{places}" in text for places in (44, 36, 52))


def test_a_pool_without_workers_shows_no_model_of_no_layers():
    status = a_pool()
    status.ClearField("model")
    assert "epoch 2\n" in printed(pool_view(status, framed=False))


def test_ranks_of_an_engine_show_what_it_is_and_no_tokens_or_requests():
    """Its plugin sees neither, and 0 would be wrong."""
    status = a_pool()
    for rank in status.ranks:
        rank.engine, rank.max_replicas, rank.weights_version = "vLLM 0.33.0", 1024, 2
        rank.tokens_processed = rank.active_requests = rank.queued_requests = 0
    text = printed(pool_view(status), width=200)
    assert text.count("vLLM 0.33.0: its ranks form their group themselves") == 1
    assert "at most 1024 per expert" in text
    assert "weights version 2" in text
    rows = [line.strip("│ ").split() for line in text.split("\n") if "worker-" in line]
    assert [(tokens, requests) for *_, tokens, _, _, requests in rows] == [("-", "-")] * 4


def test_redundancy_that_is_wasted_is_shown_with_its_bytes():
    status = a_pool()
    assert "redundancy" not in printed(pool_view(status))
    status.redundancy.kind, status.redundancy.bytes_per_rank = "wasted", 2 * 2**30
    status.redundancy.reason = "2 redundant slots per layer would do"
    text = printed(pool_view(status))
    assert "wasted: 2 redundant slots per layer would do; 2.0 GiB per rank" in text


def test_a_pool_shows_its_health_balance_and_ranks():
    text = printed(pool_view(a_pool()))
    for words in (
        "pool decode  serving",
        "generation 7 · epoch 2 · 4 layers x 32 experts",
        "balancedness 0.934",
        "worst layer 0.881",
        "window 12: 43,210 assignments in 4 s",
        "▇·▃▇",
        "worker-3",
        "node-1",
        "1.24x",
        "12.1 ms",
        "8+3",
        "3 completed, 1 aborted",
    ):
        assert words in text


def test_planned_and_realised_uneven_shares_are_shown():
    status = a_pool()
    shares = pb.ShareStatus(
        layer=2, slot=17, expert=9, planned=0.4, realised=0.4125, misplaced=0.004, assignments=900
    )
    status.shares.CopyFrom(shares)
    assert "uneven shares" not in printed(pool_view(status))
    status.shares.uneven_layers = 3
    text = " ".join(printed(pool_view(status), width=200).split())
    assert "uneven shares in 3 layers: 0.4% of replicated experts' assignments misplaced" in text
    assert "layer 2, slot 17 served 0.412 of expert 9, planned 0.400" in text


def test_a_shared_expert_in_slots_has_no_number():
    status = a_pool()
    status.model.num_experts, status.model.has_shared_expert = 257, True
    status.shares.CopyFrom(pb.ShareStatus(layer=2, expert=256, uneven_layers=1))
    text = " ".join(printed(pool_view(status), width=200).split())
    assert "layers x 256 experts and the shared one" in text
    assert "of the shared expert, planned" in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_pool_fits_the_terminal(width):
    status = a_pool()
    status.last_decision.CopyFrom(pb.Decision(sequence=3, reason="long words " * 30))
    lines = printed(pool_view(status), width=width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert "worker-0 node-0" in "".join(" ".join(line.split()) for line in lines)


def test_trouble_comes_first_and_the_worst_ranks_fill_the_terminal():
    status = a_pool()
    del status.ranks[:]
    for rank in range(320):
        status.ranks.add(
            rank=rank,
            worker=f"eq-equipoise-worker-deepseek-v3-{rank}",
            node=f"ip-10-0-{rank // 8}-17.eu-central-1.compute.internal",
            state="gone" if rank == 200 else "connected",
            trouble="no report for 21 s" if rank == 100 else "",
            load_share=(1 + rank / 320) / 480,
        )
    status.rollout.CopyFrom(pb.RolloutStatus(generation=8, state="staging", moves=14))
    decisions = [pb.Decision(sequence=12, reason="gains too little")]
    status.rejections.add(kind="report_shape", count=3, latest="worker-2: 119 bytes")
    shown = printed(pool_view(status, decisions=decisions, fits=True), width=80, height=30)
    lines = shown.splitlines()
    assert len(lines) <= 28
    order = ["rank 100", "report_shape", "generation 8 staging", "gains too little", "balancedness"]
    assert sorted(order, key=shown.index) == order
    table = lines[next(i for i, line in enumerate(lines) if " worker " in line) + 1 : -2]
    numbers = [int(line.split()[1]) for line in table]
    assert numbers[:4] == [200, 100, 319, 318]
    assert f"and {320 - len(table)} more ranks, at most 1.3" in lines[-2]
    for rank, line in zip(numbers, table, strict=True):
        name = line.split()[2]
        assert name.startswith("eq-")
        assert name.endswith(f"-{rank}")
        assert "…" in name
    assert "ip-10" not in shown, "there is no room for nodes"
    assert "ip-10" in printed(pool_view(status), width=120)
    assert len(printed(pool_view(status)).splitlines()) > 320, "without a limit all are shown"


def test_on_a_small_terminal_older_decisions_give_way_to_ranks():
    status = a_pool()
    del status.windows[:]
    for number in range(128):
        status.windows.add(window=number, balancedness=0.9, assignments=9, generation=7)
    decisions = [pb.Decision(sequence=9 - age, reason="many words " * 12) for age in range(5)]
    for height, number, ranks in ((60, 5, 4), (20, 2, 4), (14, 1, 1)):
        picture = printed(
            pool_view(status, decisions=decisions, fits=True), width=80, height=height
        )
        lines = [line.strip("│╭╮╰╯─ ") for line in picture.splitlines()]
        assert len(lines) <= height
        shown = [line.split()[1] for line in lines if line.startswith("decision")]
        assert shown == ["9", "8", "7", "6", "5"][:number]
        assert sum("worker-" in line for line in lines) == ranks
        assert any(line.endswith("◆ traffic shifted  ↑ new layout") for line in lines)


def test_rollout_decisions_switches_and_rejections_are_shown():
    status = a_pool()
    status.ranks[1].staged_generation = 8
    status.ranks[2].state = "silent"
    status.health = pb.POOL_HEALTH_DEGRADED
    status.health_reason = "rank 2 has been silent for 5.1 s"
    status.rollout.CopyFrom(
        pb.RolloutStatus(
            generation=8, state="staging", moves=14, bytes=3 * 2**20, waves_left=2, staged_ranks=[1]
        )
    )
    status.last_decision.CopyFrom(
        pb.Decision(
            sequence=12,
            accepted=True,
            reason="balance grows from 0.62 to 0.94",
            plan_ms=3.14,
        )
    )
    status.switches.add(
        generation=7, step=1234, max_stall_us=800, median_step_us=12_100, moves=12, staging_s=0.31
    )
    status.rejections.add(kind="report_shape", count=3, latest="worker-2: 119 bytes")
    status.gains.add(generation=7, outcome="kept", reason="kept, as expected: 0.91")
    status.poison_requests = 3
    status.timeouts.add(name="switch", timeout_s=5.0)
    status.timeouts.add(
        name="pull", timeout_s=5.0, reached=2, latest="worker-1: expert 3 from rank 0"
    )
    status.quarantined.add(
        worker="w-9", boot_id="b1", reason="wrong bytes", since_unix_s=9e8, until_restart=True
    )
    text = " ".join(printed(pool_view(status), width=200).split())
    for words in (
        "degraded",
        "quarantined w-9 (boot b1) since 1998-07-09",
        "until it restarts: wrong bytes",
        "rank 2 has been silent for 5.1 s",
        "worker-2 silent",
        "7→8",
        "generation 8 staging for 0.0 s: 14 moves, 3.0 MiB, staged by 1, switched by none, 2 waves",
        "12 yes balance grows from 0.62 to 0.94 (planned in 3.1 ms)",
        "generation 7 at step 1,234: 12 moves staged in 0.31 s, longest stall 0.8 ms (median step",
        "gain kept, as expected: 0.91",
        "timeout 2 x pull, 5 s: worker-1: expert 3 from rank 0",
        "3 x report_shape: worker-2: 119 bytes",
        "poison 3 requests rejected",
    ):
        assert words in text
    assert "switch, 5 s" not in text


def test_a_rollout_of_many_ranks_names_the_few_that_it_waits_for():
    status = a_pool()
    status.ranks.extend(pb.RankStatus(rank=rank) for rank in range(len(status.ranks), 320))
    status.rollout.staged_ranks[:] = [rank for rank in range(320) if rank not in {17, 200}]
    status.rollout.switched_ranks[:] = range(100)
    text = " ".join(printed(pool_view(status)).replace("│", "").split())
    assert "staged by 318 of 320 ranks (not by 17 200), switched by 100 of 320 ranks" in text


def test_an_unchecked_gain_shows_the_expectation():
    status = a_pool()
    status.gains.add(generation=7, before_generation=5, outcome="open", gain_expected=0.125)
    text = " ".join(printed(pool_view(status), width=200).split())
    assert "generation 7 is expected to gain 0.125 over generation 5; to be" in text


def test_the_gain_of_a_rollout_that_was_aborted_is_not_to_be_checked():
    status = a_pool()
    status.gains.add(generation=9, before_generation=7, outcome="open", gain_expected=0.125)
    assert "is expected to gain" not in printed(pool_view(status))


def test_ranks_without_traffic_have_no_load():
    status = a_pool()
    for rank in status.ranks:
        rank.load_share = math.nan
    text = printed(pool_view(status))
    assert text.count("no data") == 4
    assert "0.00x" not in text
    few = printed(pool_view(status, fits=True), height=12)
    assert "ranks" in few.splitlines()[-2]
    assert "at most" not in few


def test_an_empty_pool_is_shown():
    text = printed(pool_view(pb.PoolStatus(pool="new", health=pb.POOL_HEALTH_WAITING)))
    assert "waiting" in text
    assert "no window has closed yet" in text


def test_text_from_messages_is_never_markup():
    status = a_pool()
    status.pool = "[red]p"
    status.health_reason = "[/] [bold]!"
    status.ranks[0].worker = "[link=x]w"
    status.rejections.add(kind="k", count=1, latest="[/nothing]")
    text = printed(pool_view(status))
    for words in ("[red]p", "[/] [bold]!", "[link=x]w", "[/nothing]"):
        assert words in text
    assert "[blue]q" in printed(pools_view([pb.PoolSummary(pool="[blue]q")]))


def test_pools_show_their_phases_and_which_prefill_pool_has_no_partner():
    pools = [
        pb.PoolSummary(pool="p", phase="prefill", latent_forms=["v1/16"]),
        pb.PoolSummary(pool="q", phase="prefill", latent_forms=["v1/64"]),
        pb.PoolSummary(pool="d", phase="decode", latent_forms=["v1/64"]),
    ]
    shown = printed(pools_view(pools))
    assert "prefill" in shown
    assert "prefill pool p hands over to no decode pool: its latents are v1/16" in shown
    assert "those of d are v1/64" in shown
    assert "prefill pool q" not in shown


def test_pools_show_the_ranks_that_their_traffic_calls_for():
    pools = [
        pb.PoolSummary(pool="p", ranks_serving=4, num_ranks=4, advised_ranks=37),
        pb.PoolSummary(pool="d", ranks_serving=6, num_ranks=6),
    ]
    header, first, second = printed(pools_view(pools)).splitlines()
    assert header.split()[3:5] == ["ranks", "advised"]
    assert first.split()[3:5] == ["4/4", "37"]
    assert second.split()[3:5] == ["6/6", "-"]


def test_handovers_between_pools_are_shown_at_both_ends():
    pools = [
        pb.PoolSummary(pool="p", handovers=pb.HandoverStatus(held_prompts=1951, held_tokens=480)),
        pb.PoolSummary(
            pool="d",
            handovers=pb.HandoverStatus(
                handed_over_prompts=1947, handed_over_tokens=100_000, missing_tokens=7
            ),
        ),
        pb.PoolSummary(pool="m"),
    ]
    first, second = printed(pools_view(pools)).splitlines()[4:]
    assert first.rstrip() == "p: 1,951 prompts to other pools, 480 tokens held now"
    # Not 100 %, which means that all arrived.
    arrived = "99.9 % of their latents arrived"
    assert second.rstrip() == f"d: 1,947 prompts from other pools, {arrived}"
    status = a_pool()
    assert "handovers" not in printed(pool_view(status))
    status.handovers.held_prompts = 3
    assert "handovers  3 prompts to other pools" in printed(pool_view(status))
    status.handovers.held_prompts = 1
    assert "handovers  1 prompt to other pools" in printed(pool_view(status))


def test_the_status_line_has_the_essentials():
    status = a_pool()
    assert status_line(status) == (
        "pool decode · serving · generation 7 · window 12: balancedness 0.934 on 43,210 assignments"
    )
    status.rollout.generation, status.rollout.state = 8, "staged"
    status.last_decision.CopyFrom(pb.Decision(sequence=4, reason="too few assignments: 12"))
    status.health_reason = "rank 1 left"
    assert status_line(status).endswith(
        "generation 8 staged · rank 1 left · decision 4 no: too few assignments: 12"
    )


def test_the_sparkline_is_high_where_load_is_even():
    assert sparkline([1.0, 0.75, 0.4, 0.0, 2.0, None]).plain == "█▅▁▁█·"
    assert sparkline([]).plain == ""


def test_marks_stand_below_their_windows():
    windows = [
        pb.WindowStatus(generation=generation, shift_detected=shift)
        for generation, shift in ((1, False), (1, True), (2, False), (2, False), (4, True))
    ]
    assert window_marks(windows).plain.startswith(" ◆↑ ◆ ")


@pytest.mark.parametrize(
    ("share", "bar"),
    [(0.25, "█████      1.00x"), (0.9, "██████████ 3.60x"), (0, "           0.00x")],
)
def test_a_load_bar_is_half_full_at_the_mean(share, bar):
    assert load_bar(share, num_ranks=4).plain == bar


def test_balance_is_coloured():
    assert [balance_style(value) for value in (1.0, 0.9, 0.89, 0.8, 0.79, 0.0)] == (
        ["green", "green", "yellow", "yellow", "red", "red"]
    )


def test_sizes_and_times_are_readable():
    assert [format_bytes(size) for size in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == (
        ["0 B", "1023 B", "1.0 KiB", "5.0 GiB", "3.0 TiB"]
    )
    assert [format_duration(us) for us in (0, 80, 12_100, 2_500_000)] == (
        ["-", "0.1 ms", "12.1 ms", "2.5 s"]
    )


def test_rates_come_from_two_statuses_a_second_apart():
    meter, status = RateMeter(), a_pool()
    assert meter.update(status, now=10.0) == {}
    status.ranks[0].tokens_processed += 50
    assert meter.update(status, now=10.5) == {}
    status.ranks[0].tokens_processed += 150
    status.ranks[1].tokens_processed = 3  # restarted
    assert meter.update(status, now=12.0) == {0: 100.0, 2: 0.0, 3: 0.0}
    status.ranks[1].tokens_processed = 43
    assert meter.update(status, now=14.0)[1] == 20.0
    assert "tokens/s" in printed(pool_view(status, tokens_per_s={0: 100.0}))
