"""Engines accept the commands of the guide and of the examples: `make test-engines`."""

import re
import shlex
import subprocess

import pytest
import yaml

from tests.engines.wheels import ROOT, run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

STARTS = {"vllm": "vllm serve", "sglang": "python3 -m sglang.launch_server"}


def commands(engine):
    """The guide's command, and the example's as the shell of its second pod reads it."""
    guide = (ROOT / "docs" / "engines.md").read_text()
    (found,) = re.findall(rf"^ +({STARTS[engine]} (?:.*\\\n)*.*)$", guide, re.MULTILINE)
    yield shlex.split(found.replace("\\\n", " "))
    spec = yaml.safe_load((ROOT / f"helm/engines/{engine}.yaml").read_text())["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    (script,) = template["spec"]["containers"][0]["args"]
    place = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "10.0.0.1"}
    shown = subprocess.run(
        ["bash", "-c", script.replace("exec ", "printf '%s\\n' ")],
        env=place,
        capture_output=True,
        text=True,
        check=True,
    )
    yield shown.stdout.splitlines()


def test_the_engine_accepts_the_options_of_the_guide_and_of_its_example(release):
    engine = release.partition("=")[0]
    for command in commands(engine):
        options = command[len(STARTS[engine].split()) :]
        assert "--enable-eplb" in options
        run(release, "tests.engines.flags_main", engine, *options)
