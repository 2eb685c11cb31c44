import asyncio

import pytest
from rich.console import Console

from equipoise.cli.demo.fleet import Fleet, FleetError
from equipoise.cli.demo.run import Demo, run
from equipoise.cli.demo.settings import DemoSettings
from equipoise.cli.demo.view import PlainScreen
from equipoise.settings.errors import InvalidSettingsError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"workers": 3}, r"nodes \(2\) must divide workers \(3\)"),
        ({"max_output_tokens": 5}, "max_output_tokens"),
        ({"interval_s": 0.0}, "interval_s must be above 0"),
        ({"seconds_per_domain": float("nan")}, "seconds_per_domain"),
        ({"domains": ()}, "domains must be one or more"),
        ({"domains": ("poems",)}, "code, english, arithmetic"),
        ({"disaggregated": True, "workers": 6}, r"workers \(6\) must be a multiple of 4"),
        ({"disaggregated": True, "domains": ("code",)}, "begin and end with different kinds"),
    ],
)
def test_settings_outside_their_range_are_named_with_it(changes, words):
    with pytest.raises(InvalidSettingsError, match=words):
        DemoSettings(**changes)


def test_a_process_that_fails_at_startup_ends_the_demo_with_its_last_log_lines(tmp_path):
    state = tmp_path / "state.sqlite"
    state.write_text("this is no database, and long enough to be taken for a damaged one" * 100)
    settings = DemoSettings(workers=1, nodes=1, slots_per_rank=32, listen="127.0.0.1:0")

    async def demo() -> None:
        screen = PlainScreen(Console(quiet=True))
        async with Fleet(tmp_path) as fleet:
            await Demo(settings, fleet=fleet, screen=screen, state=state).run()

    with pytest.RaisesGroup(FleetError, flatten_subgroups=True) as caught:
        asyncio.run(demo())
    (error,) = caught.value.exceptions
    assert "balancer exited unexpectedly" in str(error)
    assert "state.sqlite" in str(error)


def test_a_missing_checkpoint_is_one_fault(tmp_path):
    settings = DemoSettings(listen="127.0.0.1:0", checkpoint=tmp_path / "nowhere", plain=True)
    with pytest.raises(InvalidSettingsError, match="nowhere"):
        run(settings)


def test_an_unwritable_file_is_reported_before_the_demo_starts(tmp_path):
    (tmp_path / "config.json").touch()
    settings = DemoSettings(checkpoint=tmp_path, json=tmp_path / "nowhere" / "figures.json")
    with pytest.raises(InvalidSettingsError, match=r"cannot write .*figures\.json"):
        run(settings)
