"""A worker profiles a few of its steps once, and writes one file."""

import threading
from pathlib import Path

import pytest

from equipoise.cli.overlap.analysis import analyse
from equipoise.cli.overlap.names import Names
from equipoise.cli.overlap.timeline import Timeline
from equipoise.formats.trace import read_slices
from equipoise.rank.errors import WorkerError
from equipoise.settings.errors import InvalidSettingsError
from equipoise.worker import profile as profiling
from equipoise.worker.profile import StepProfiler
from tests.support.lone_engine import Client, engine_of, leave_when_done, request
from tests.support.small_models import SMALL as CONFIG


def steps_of(path):
    return analyse(Timeline.of(read_slices(path), Names())).num_steps


def wait_for_files():
    for thread in threading.enumerate():
        if thread.name == "profile":
            thread.join(60)


@pytest.fixture
def run(rank_of_one, solo):
    """Serve a request of 12 tokens with a profiler."""

    def serve(profiler):
        client = Client(leave_when_done(1))
        engine = engine_of(*rank_of_one(), client, after_turn=profiler.note_turn)
        engine.submit(request(3, 12))
        engine.run()
        profiler.close()
        wait_for_files()
        assert client.tokens[3] == solo(request(3).prompt, 12)

    return serve


def test_steps_after_the_first_are_profiled_once(run, tmp_path):
    path = tmp_path / "trace.json.gz"
    profiler = StepProfiler(num_steps=4, path=path)
    run(profiler)
    found = analyse(Timeline.of(read_slices(path), Names()))
    assert (found.num_steps, len(found.tracks)) == (4, 1)
    assert [layer for layer, _ in found.layers] == list(range(CONFIG.num_moe_layers))
    assert found.times.experts_us > 0
    assert found.times.attention_us > 0
    assert found.times.communication_us == 0
    written = path.read_bytes()
    run(profiler)
    assert path.read_bytes() == written
    assert list(tmp_path.iterdir()) == [path]


def test_an_epoch_that_ends_leaves_a_profile_of_fewer_steps(run, tmp_path):
    path = tmp_path / "trace.json.gz"
    run(StepProfiler(num_steps=100, path=path))
    assert 4 < steps_of(path) < 12


def test_a_profile_ends_after_its_time_however_few_steps_it_has(run, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "MAX_S", 0.0)
    run(StepProfiler(num_steps=100, path=tmp_path / "trace.json.gz"))
    assert steps_of(tmp_path / "trace.json.gz") == 1


def test_a_disk_that_takes_no_file_costs_the_profile_only(run, tmp_path, caplog):
    run(StepProfiler(num_steps=2, path=tmp_path / "missing" / "trace.json.gz"))
    assert "the profile cannot be written" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_settings_without_steps_profile_nothing(run, settings, cpu):
    run(StepProfiler.of(settings(), device=cpu))


def test_settings_name_the_file_by_pool_and_worker(settings, tmp_path, cpu):
    chosen = settings(
        profile_steps=2, profile_folder=tmp_path / "new", pool="a/b", worker="../../w 1"
    )
    path = StepProfiler.of(chosen, device=cpu).path
    assert path == tmp_path / "new" / "a_b-.._.._w_1.trace.json.gz"


def test_settings_need_a_folder_that_can_be_made(settings, cpu):
    with pytest.raises(InvalidSettingsError, match="profile_steps needs profile_folder"):
        settings(profile_steps=2)
    with pytest.raises(InvalidSettingsError, match="profile_steps"):
        settings(profile_steps=21, profile_folder=Path())
    chosen = settings(profile_steps=2, profile_folder=Path("/dev/null/traces"))
    with pytest.raises(WorkerError, match="profile_folder /dev/null/traces: Not a directory"):
        StepProfiler.of(chosen, device=cpu)


@pytest.fixture
def cpu():
    import torch

    return torch.device("cpu")
