"""A setting outside its range is named, with its value and the range."""

import subprocess
import sys

import pytest

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from equipoise.worker.settings import WorkerSettings


def test_the_defaults_serve_the_checkpoint_that_comes_with_the_package():
    assert WorkerSettings().checkpoint == packaged_checkpoint()
    assert packaged_checkpoint().parts[-3:] == ("equipoise_model", "checkpoints", "tiny")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker": ""}, "worker must not be empty"),
        (
            {"balancer": "nowhere"},
            "balancer must be host:port with a port from 1 to 65535, not 'nowhere'",
        ),
        ({"listen": "127.0.0.1:99999"}, "listen must be host:port"),
        ({"host": ""}, "host must not be empty"),
        ({"peer_pools": ("a", "default")}, "peer_pools lists this worker's own pool default"),
        ({"rendezvous_port": 65536}, "rendezvous_port must be from 0 to 65535, not 65536"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, not 0"),
        ({"slots_per_rank": -1}, "slots_per_rank must be at least 1, not -1"),
        ({"max_queued_requests": -1}, "max_queued_requests must be at least 0, not -1"),
        ({"context_length": 1}, "context_length must be at least 2"),
        ({"max_step_tokens": 8}, r"max_step_tokens \(8\) must be at least max_requests \(16\)"),
        ({"pull_mib_per_s": 0.0}, "pull_mib_per_s must be above 0, not 0.0"),
        ({"step_timeout_s": 0.0}, "step_timeout_s must be above 0 and at most 3600, not 0.0"),
    ],
)
def test_a_bad_setting_is_named_with_its_range(changes, words):
    with pytest.raises(InvalidSettingsError, match=words):
        WorkerSettings(**changes)


def test_settings_can_be_read_without_torch():
    code = (
        "import sys; from equipoise.worker.settings import WorkerSettings; WorkerSettings(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
