"""What imbalance costs in GPUs and money."""

import math

import pytest

from equipoise.cli.offline.money import CostSettings
from equipoise.settings.errors import InvalidSettingsError
from tests.cli.test_replay import POOL, replayed
from tests.cli.test_replay import equipoise as replay
from tests.cli.test_whatif import SMALL
from tests.cli.test_whatif import equipoise as whatif


def test_even_ranks_lose_nothing_and_a_half_loaded_pool_loses_half():
    assert CostSettings().lost_gpus(1.0, num_ranks=32) == 0
    assert CostSettings().lost_gpus(0.5, num_ranks=32) == pytest.approx(16)


def test_only_the_experts_share_of_a_step_is_lost():
    """Half of a step in experts: it takes 1.5 times as long, so a third is lost."""
    cost = CostSettings(expert_share=0.5, gpu_hour_price=2.0)
    lost = cost.lost_gpus(0.5, num_ranks=30)
    assert lost == pytest.approx(10)
    assert cost.price_per_hour(lost) == pytest.approx(20)
    assert cost.basis == "with 50% of a balanced step in experts"
    assert CostSettings().price_per_hour(lost) is None


@pytest.mark.parametrize(
    "bad", [{"gpu_hour_price": -1.0}, {"gpu_hour_price": math.inf}, {"expert_share": 1.5}]
)
def test_costs_have_ranges(bad):
    with pytest.raises(InvalidSettingsError):
        CostSettings(**bad)


def test_a_replay_shows_what_each_policy_loses():
    text = replay(*POOL, "--policy", "default", "--gpu-hour-price", "2", columns="140")
    assert "GPUs lost" in text
    assert (
        "GPUs lost to imbalance, at most: as if a step consisted only of expert computation" in text
    )
    shown = replayed(*POOL, "--policy", "default", "--gpu-hour-price", "2")
    assert shown["never"]["gpus_lost"] > shown["default"]["gpus_lost"] > 0
    for run in shown.values():
        assert run["price_lost_per_hour"] == pytest.approx(2 * run["gpus_lost"])


def test_whatif_shows_what_each_pool_loses():
    text = whatif(*SMALL, "--gpu-hour-price", "3", "--expert-share", "0.4", columns="160")
    assert "price/h" in text
    assert "GPUs lost to imbalance, with 40% of a balanced step in experts" in text
    assert "GPUs lost" not in whatif(*SMALL)


def test_a_narrow_terminal_loses_no_figure():
    narrow = whatif(*SMALL, "--gpu-hour-price", "3", columns="80")
    wide = whatif(*SMALL, "--gpu-hour-price", "3", columns="160")
    assert "…" not in narrow
    assert next(line for line in wide.splitlines() if "◀" in line).split() in [
        line.split() for line in narrow.splitlines()
    ]


def test_a_share_of_experts_shows_gpus_without_a_price():
    text = whatif(*SMALL, "--expert-share", "0.4")
    assert "GPUs lost to imbalance, with 40%" in text
    assert "price/h" not in text
