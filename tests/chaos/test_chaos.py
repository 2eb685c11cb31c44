"""A short campaign: a fleet on Redis and one of two pools survive a run each."""

import pytest

from equipoise.planning.warm_up import warm_up
from tests.support.chaos.campaign import results, undisturbed_answers
from tests.support.chaos.plan import Ground
from tests.support.redis_server import require_redis

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SEEDS = {Ground.REDIS: 37, Ground.POOLS: 12}


@pytest.fixture(scope="module")
def answers():
    warm_up()
    return undisturbed_answers()


@pytest.mark.parametrize("ground", SEEDS)
async def test_no_invariant_is_violated_by_faults(ground, answers, tmp_path):
    if ground is Ground.REDIS:
        require_redis()
    performed = [
        result
        async for result in results(
            [SEEDS[ground]], ground=ground, folder=tmp_path, answers=answers, clock_library=None
        )
    ]
    assert [result.violations for result in performed] == [()]
    assert performed[0].num_answers > 0
    assert bool(performed[0].num_latents) == (ground is Ground.POOLS)
