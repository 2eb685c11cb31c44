import subprocess
import sys
from importlib.metadata import version

import pytest

BOUND_S = 60.0


def without(*packages):
    return f"""
import sys

class Reject:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Reject())
"""


WITHOUT_TORCH = without("torch", "safetensors")
RUN = """
from equipoise.cli.main import main
main()
"""


def equipoise(*arguments, before=""):
    return subprocess.run(
        [sys.executable, "-c", before + RUN, *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def test_the_version_is_the_packages():
    done = equipoise("--version")
    assert (done.returncode, done.stdout) == (0, f"equipoise {version('equipoise')}\n")


def test_without_a_command_the_commands_are_listed_at_once():
    done = equipoise(before=without("numpy", "grpc", "pydantic"))
    assert done.returncode == 2
    for command in ("balancer", "worker", "status", "demo"):
        assert command in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["balancer", "--listen", "nowhere"], 2, "--listen must be host:port with a port"),
        (["balancer", "--interval-s", "0"], 2, "--interval-s must be from 0.05 to 86400, not 0.0"),
        (
            ["generate", "a", "--temperature", "1e-300"],
            2,
            "--temperature = 1e-300 is out of range: it must be 0 (greedy) or from 0.01 to 100",
        ),
        (["status", "--address", "h"], 2, "--address must be host:port with a port"),
        (
            ["status", "--address", "127.0.0.1:9"],
            1,
            "no balancer answers at 127.0.0.1:9: ",
        ),
    ],
)
def test_a_users_error_is_one_line(arguments, status, message):
    done = equipoise(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"equipoise: {message}")


def test_a_worker_without_torch_names_the_package_to_install():
    done = equipoise("worker", before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr == (
        "equipoise: this needs equipoise[worker] (there is no torch): run pip install '.[worker]' "
        "in a checkout\n"
    )


@pytest.mark.parametrize("command", ["balancer", "worker"])
def test_the_help_names_the_extra_that_an_option_needs(command):
    assert "Needs equipoise[tracing]." in " ".join(equipoise(command, "--help").stdout.split())


def test_the_control_planes_commands_need_no_torch():
    done = equipoise("status", "--address", "127.0.0.1:9", before=WITHOUT_TORCH)
    assert "no balancer answers" in done.stderr
    assert equipoise("balancer", "--help", before=WITHOUT_TORCH).returncode == 0


def test_our_own_fault_keeps_its_traceback():
    broken = "import equipoise.cli.live.status as s; s.run = lambda settings: 1 // 0"
    done = equipoise("status", before=broken)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr


def test_ctrl_c_ends_without_a_traceback_and_with_status_130():
    interrupted = (
        "import equipoise.cli.live.status as s, os, signal\n"
        "s.run = lambda settings: os.kill(os.getpid(), signal.SIGINT)"
    )
    done = equipoise("status", before=interrupted)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
