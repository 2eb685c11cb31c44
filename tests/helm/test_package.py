"""The chart as it is published: its README, and the package that `make package` writes."""

import importlib.util
import shutil
import subprocess
import tarfile

import pytest
import yaml

from tests.support.helm_chart import CHART, ROOT, helm, helm_command


def _reference():
    """helm/values_reference.py, which belongs to no package."""
    path = ROOT / "helm" / "values_reference.py"
    spec = importlib.util.spec_from_file_location("values_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_every_value_and_is_current():
    reference = _reference()
    assert reference.WRITTEN.read_text() == reference.page(), "python helm/values_reference.py"
    named = {path for path, _ in reference.explained(reference.VALUES.read_text())}
    missing = {
        path
        for path in _leaves(yaml.safe_load(reference.VALUES.read_text()))
        if not any(path == one or path.startswith(f"{one}.") for one in named)
    }
    assert not missing


def test_the_package_renders_as_the_folder_and_contains_its_readme(tmp_path):
    subprocess.run([helm(), "package", CHART, "-d", tmp_path], check=True, capture_output=True)
    (package,) = tmp_path.iterdir()
    assert package.name == "equipoise-0.1.0.tgz"
    with tarfile.open(package) as opened:
        assert "equipoise/README.md" in opened.getnames()
    rendered = [helm_command("template", "eq", where, "-n", "moe") for where in (CHART, package)]
    assert rendered[0] == rendered[1]


def test_a_signed_package_is_verified_by_its_provenance(tmp_path):
    if shutil.which("gpg") is None:
        pytest.skip("no gpg here (apt-get install gnupg)")
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", home, "--batch", "--passphrase", "", "--pinentry-mode", "loopback"]
    name = "equipoise test"
    _run(*gpg, "--quick-generate-key", name, "rsa2048", "sign", "1d")
    for keys in ("--export", "--export-secret-keys"):
        (tmp_path / keys).write_bytes(_run(*gpg, keys))
    _run(shutil.which("gpgconf"), "--homedir", home, "--kill", "all")
    signing = [f"SIGN={name}", f"KEYRING={tmp_path / '--export-secret-keys'}"]
    _run("make", "-s", "-C", ROOT, "package", f"DIST={tmp_path}", *signing)
    package = tmp_path / "equipoise-0.1.0.tgz"
    verify = [helm(), "verify", "--keyring", tmp_path / "--export", package]
    assert name in _run(*verify).decode()
    package.write_bytes(package.read_bytes() + b"x")
    assert subprocess.run(verify, capture_output=True, check=False).returncode != 0


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True).stdout


def _leaves(values, path=""):
    for name, value in values.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from _leaves(value, inner)
        else:
            yield inner
