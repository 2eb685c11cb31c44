"""Every command runs its implementation and ends with a documented exit status.

The list of commands comes from the program itself: a new command fails here until it has arguments
in `GOOD`.
"""

import json
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import typer

from equipoise.cli.main import app, main
from equipoise.formats.packaged import packaged_checkpoint
from tests.cli.conftest import serving_gateway
from tests.support.running_fleet import on_a_thread, running_fleet

BOUND_S = 120.0
TINY = packaged_checkpoint()
NOBODY = "127.0.0.1:9"
SERVICES = {
    "balancer": ["--listen=127.0.0.1:0", "--store={folder}/own.sqlite"],
    "gateway": ["--listen=127.0.0.1:0", "--workers", NOBODY],
    "worker": ["--balancer", NOBODY, "--device=cpu"],
}
"""Commands that run until they are stopped."""

LOADS = ["--loads", str(TINY / "loads.json")]
POOL = [*LOADS, "--nodes", "2", "--ranks", "4", "--slots", "40"]
DONE, DONE_OR_REJECTED = {0}, {0, 3}
GOOD = {
    "status": (["--json"], DONE),
    "decisions": ([], DONE),
    "audit": ([], DONE),
    "epochs": ([], DONE),
    "loads": ([], DONE),
    "layout show": (["--layer", "1"], DONE),
    "layout diff": (["1", "2"], {3}),
    "layout export": (["{folder}/exported.json"], DONE),
    "layout import": (["{layout}"], DONE_OR_REJECTED),
    "rebalance": (["--reason", "test"], DONE_OR_REJECTED),
    "pause": ([], DONE_OR_REJECTED),
    "resume": ([], DONE_OR_REJECTED),
    "rollback": (["--generation", "1"], DONE_OR_REJECTED),
    "pin": ([], DONE_OR_REJECTED),
    "unpin": ([], DONE_OR_REJECTED),
    "preview": (["--set", "min_gain=0.01"], DONE_OR_REJECTED),
    "policy validate": (["{policy}"], DONE),
    "policy show": (["{policy}"], DONE),
    "policy diff": (["{policy}", "{other_policy}"], {3}),
    "policy schema": ([], DONE),
    "policy preview": (["{policy}"], DONE),
    "plan": ([*POOL, "--out", "{folder}/plan.json"], DONE),
    "replay": ([*POOL, "--policy", "calm=min_gain=0.05"], DONE),
    "whatif": ([*LOADS, "--ranks", "4"], DONE),
    "convert": (["--file", LOADS[1], "--out", "{folder}/loads.npz", "--format", "deepseek"], DONE),
    "overlap": (["{trace}"], DONE),
    "checkpoint convert": (["--checkpoint", str(TINY), "--out", "{folder}/fp8"], DONE),
    "checkpoint manifest": (["--checkpoint", str(TINY)], DONE),
    "demo": (
        [
            *("--plain", "--workers=1", "--nodes=1", "--slots-per-rank=32", "--domains=code"),
            *("--interval-s=1", "--seconds-per-domain=1", "--prompts-per-domain=1"),
            *("--clients-per-rank=1", "--listen=127.0.0.1:0", "--web-listen=127.0.0.1:0"),
        ],
        DONE,
    ),
    "generate": (["def f(", "--max-tokens", "2"], DONE),
    "handover": (["--url", "{url}", "--prompt-tokens", "8"], {3}),
    "bench serve": (["--url", "{url}", "--requests", "2", "--warm-up", "1"], DONE),
}
"""Arguments of each command that ends by itself, and the exit statuses to expect."""

BAD = [
    ("status", ["--timeout-s", "0"], 2),
    ("status", ["--pool", "no-such-pool"], 1),
    ("decisions", ["--limit", "0"], 2),
    ("audit", ["--limit", "1001"], 2),
    ("audit", ["--pool", "no-such-pool"], 1),
    ("loads", ["--out", "{folder}/loads.gif"], 2),
    ("layout show", ["--layer", "9"], 2),
    ("layout show", ["--generation", "99"], 1),
    ("layout diff", ["{folder}/missing.json"], 2),
    ("layout export", ["{folder}/missing/exported.json"], 2),
    ("layout import", ["{policy}"], 2),
    ("rebalance", ["--all-pools", "--pool", "p"], 2),
    ("rollback", ["--generation", "99"], 1),
    ("pin", ["--generation", "-1"], 2),
    ("preview", ["--set", "min_gain"], 2),
    ("policy validate", ["{folder}/missing.yaml"], 2),
    ("policy show", ["{folder}/missing.yaml"], 2),
    ("policy diff", ["{policy}", "{folder}/missing.yaml"], 2),
    ("policy preview", ["{folder}/missing.yaml"], 2),
    ("policy preview", ["{policy}", *LOADS], 2),
    ("plan", ["--loads", "{folder}/missing.json", "--ranks", "4"], 2),
    ("replay", [*POOL, "--policy", "x"], 2),
    ("whatif", [*LOADS, "--ranks", "0"], 2),
    ("convert", ["--file", "{folder}/missing.json", "--out", "{folder}/x.json"], 2),
    ("overlap", ["{folder}/missing.json"], 2),
    ("overlap", ["{policy}"], 2),
    ("overlap", ["{trace}", "--plot", "{folder}/x.gif"], 2),
    ("checkpoint convert", ["--checkpoint", "{folder}/missing", "--out", "{folder}/x"], 2),
    ("checkpoint manifest", ["--checkpoint", "{folder}/missing"], 2),
    ("demo", ["--workers", "3"], 2),
    ("demo", ["--checkpoint", "{folder}/missing"], 2),
    ("generate", ["x", "--checkpoint", "{folder}/missing"], 1),
    ("generate", ["x", "--url", f"http://{NOBODY}"], 2),
    ("handover", ["--url", f"http://{NOBODY}"], 2),
    ("bench serve", ["--url", f"http://{NOBODY}"], 2),
    ("balancer", ["--listen", "nowhere"], 2),
    ("balancer", ["--store", "{folder}/missing/state.sqlite", "--listen", "127.0.0.1:0"], 1),
    ("gateway", ["--listen", "nowhere"], 2),
    ("worker", ["--checkpoint", "{folder}/missing"], 1),
]


def leaves(command, path=()):
    """Every command that has no subcommands, by its name on the command line."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return {" ".join(path): command}
    found = {}
    for name, below in commands.items():
        found |= leaves(below, (*path, name))
    return found


COMMANDS = leaves(typer.main.get_command(app))
CLIENTS = [
    name
    for name, command in COMMANDS.items()
    if any(one.name == "address" for one in command.params)
]


@asynccontextmanager
async def fleet_and_gateway(folder):
    # On one event loop: gRPC shares one poller between the loops of a process.
    async with running_fleet(folder) as address, serving_gateway(folder / "gateway") as gateway:
        yield address, gateway


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A running fleet, a gateway, and files."""
    folder = tmp_path_factory.mktemp("commands")
    head = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"
    (folder / "policy.yaml").write_text(head)
    (folder / "other.yaml").write_text(f"{head}defaults: {{judging: {{minGain: 0.25}}}}\n")
    table = [[slot % 8 for slot in range(12)]] * 2
    layout = {"num_experts": 8, "num_ranks": 4, "expert_of_slot": table}
    (folder / "layout.json").write_text(json.dumps(layout))
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
    (folder / "trace.json").write_text(json.dumps([kernel]))
    (folder / "gateway").mkdir()
    with on_a_thread(fleet_and_gateway(folder)) as (address, web):
        yield SimpleNamespace(
            address=address,
            names={
                "folder": folder,
                "policy": folder / "policy.yaml",
                "other_policy": folder / "other.yaml",
                "layout": folder / "layout.json",
                "trace": folder / "trace.json",
                "url": web.url,
            },
        )


@pytest.fixture
def equipoise(place, monkeypatch, capfd):
    """Run a command line in this process; gives its exit status, stdout and stderr."""

    def run(name, arguments):
        monkeypatch.setenv("EQUIPOISE_ADDRESS", place.address)
        words = [word.format(**place.names) for word in arguments]
        monkeypatch.setattr("sys.argv", ["equipoise", *name.split(), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return ended.value.code, out, err

    return run


def test_every_command_has_arguments_here():
    assert set(COMMANDS) == {*GOOD, *SERVICES}


@pytest.mark.parametrize("name", GOOD)
def test_a_command_does_its_work(equipoise, name):
    arguments, statuses = GOOD[name]
    status, out, err = equipoise(name, arguments)
    assert status in statuses, err
    assert out.strip()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_starts_and_stops_on_sigterm(name, place):
    arguments = [word.format(**place.names) for word in SERVICES[name]]
    with subprocess.Popen(
        [sys.executable, "-m", "equipoise.cli.main", name, *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        log = ""
        for line in process.stderr:
            log += line
            if re.search("listens on|listening on", line):
                process.send_signal(signal.SIGTERM)
                break
        log += process.stderr.read()
        assert process.wait(BOUND_S) == 0, log
    assert "Traceback" not in log


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_a_usage_error(equipoise, name):
    status, out, err = equipoise(name, ["--no-such-option"])
    assert (status, out) == (2, "")
    assert "No such option" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(equipoise, name):
    status, out, _ = equipoise(name, ["--help"])
    assert status == 0
    assert re.search(rf"Usage: .* {name} ", out)
    assert "…" not in out, "a text is cut at 80 columns"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_command_without_its_balancer_names_the_remedy(equipoise, name):
    status, out, err = equipoise(name, [*GOOD[name][0], "--address", NOBODY])
    (line,) = err.splitlines()
    assert (status, out) == (1, "")
    assert line.startswith(f"equipoise: no balancer answers at {NOBODY}: start one with ")


@pytest.mark.parametrize("name", CLIENTS)
def test_a_command_that_talks_to_a_balancer_takes_all_credentials(name):
    options = {option for one in COMMANDS[name].params for option in one.opts}
    assert options >= {
        *("--address", "--pool", "--json", "--timeout-s", "--tls-ca", "--tls-cert", "--tls-key"),
        *("--insecure", "--tls-balancer-name", "--signing-key"),
    }


@pytest.mark.parametrize(("name", "arguments", "expected"), BAD)
def test_bad_arguments_end_in_one_line(equipoise, name, arguments, expected):
    status, out, err = equipoise(name, arguments)
    assert (status, out) == (expected, "")
    *_, line = err.splitlines()
    assert re.search("[a-z]", line)
    if status == 2:
        assert line.startswith(("equipoise: ", "/")) or "Error" in err
