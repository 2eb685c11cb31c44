"""Both images, built and run as the chart runs them: as user 10001, who may write to /tmp only."""

import json
import os
import subprocess

import pytest

TOOL = os.environ.get("EQUIPOISE_IMAGE_TOOL")
USER = "10001:10001"

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(900),
    pytest.mark.skipif(TOOL is None, reason="run by `make test-images`, which builds the images"),
]

# Triton's own C source for NVIDIA GPUs, built as at the first launch of a kernel; an empty library
# stands for the driver's.
BUILD_LAUNCHER = """
import pathlib, subprocess, triton.backends.nvidia as nvidia
from triton import knobs
from triton.runtime.build import _build
cache, here = pathlib.Path(knobs.cache.dir), pathlib.Path(nvidia.__file__).parent
cache.mkdir(parents=True)
(cache / "driver.c").write_text("")
subprocess.run(["gcc", "-shared", "-o", cache / "libcuda.so.1", cache / "driver.c"], check=True)
built = _build("cuda_utils", str(here / "driver.c"), str(cache), [str(cache)],
               [str(here / "include")], ["libcuda.so.1"], [])
print(pathlib.Path(built).stat().st_size)
"""


@pytest.fixture(params=["control-plane", "worker"])
def image(request):
    """Runs a command in a new container of an image; returns the finished process."""
    yield from container(request.param)


@pytest.fixture
def worker_image():
    yield from container("worker")


def container(target):
    name = f"equipoise/{target}"
    if TOOL == "buildah":
        made = subprocess.run(["buildah", "from", name], capture_output=True, text=True, check=True)
        working = made.stdout.strip()
        prefix = ["buildah", "run", "--isolation=chroot", f"--user={USER}", working, "--"]
    else:
        working = None
        read_only = [
            "--read-only",
            "--tmpfs=/tmp:exec",
            f"--user={USER}",
            "--entrypoint=/usr/bin/env",
        ]
        prefix = [TOOL, "run", "--rm", *read_only, name]

    def run(*command, check=True):
        return subprocess.run([*prefix, *command], capture_output=True, text=True, check=check)

    yield run
    if working:
        subprocess.run(["buildah", "rm", working], capture_output=True, check=True)


def test_the_program_runs_as_a_user_without_a_home(image):
    assert image("equipoise", "--version").stdout.startswith("equipoise ")
    assert image("id", "-u").stdout.strip() == "10001"
    assert image("sh", "-c", "touch /opt/file", check=False).returncode


@pytest.mark.parametrize(("target", "package"), [("control-plane", "grpcio"), ("worker", "torch")])
def test_an_image_lists_its_packages(target, package):
    for run in container(target):
        listed = json.loads(run("cat", "/opt/equipoise/sbom.cdx.json").stdout)
        names = {one["name"] for one in listed["components"]}
        assert package in names
        assert listed["metadata"]["component"]["name"] == "equipoise"


def test_the_control_plane_has_a_compiled_planner_and_no_torch():
    for run in container("control-plane"):
        missing = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('triton'))"
        assert run("python", "-c", missing).stdout.split() == ["None", "None"]
        assert run("find", "/opt/equipoise/compiled", "-name", "*.nbc").stdout.count("\n") > 10


def test_triton_can_build_its_launchers_in_the_worker(worker_image):
    built = worker_image("python", "-c", BUILD_LAUNCHER)
    assert int(built.stdout) > 10_000


def test_a_worker_without_the_gpu_that_it_is_to_use_exits_with_the_reason(worker_image):
    done = worker_image("equipoise", "worker", "--device=cuda", "--weights=fp8", check=False)
    assert done.returncode == 1
    assert "device: there is no device cuda:0" in done.stderr


def test_the_demo_runs_in_the_worker(worker_image):
    # The worker's image has no compiled planner; the demo waits for one, but not for long.
    compile_first = "export NUMBA_CACHE_DIR=/tmp/numba; python -m equipoise.planning.warm_up >&2"
    demo = "equipoise demo --plain --json /tmp/demo.json >&2 && cat /tmp/demo.json"
    done = worker_image("sh", "-c", f"{compile_first} && {demo}", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = json.loads(done.stdout)
    assert shown["failed_requests"] == 0
    assert shown["tokens_identical"] == shown["tokens_compared"] > 0
