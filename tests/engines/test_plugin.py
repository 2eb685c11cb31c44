"""A plugin does nothing unless it is asked to, and never keeps an engine from starting."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from equipoise.engines import plugin, sglang, vllm
from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.settings import Mode, settings_from

ROOT = Path(__file__).parents[2]
WANTED = {
    "EQUIPOISE_BALANCER": "127.0.0.1:7070",
    "EQUIPOISE_POOL": "p",
    "EQUIPOISE_LISTEN": "127.0.0.1:0",
}


def test_without_the_environment_nothing_is_imported():
    script = (
        "import sys; from equipoise.engines import plugin; plugin.vllm(); plugin.sglang();"
        "print([name for name in ('torch', 'grpc', 'numpy') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": f"{ROOT}/services"}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("register", [plugin.vllm, plugin.sglang])
def test_an_engine_without_its_package_starts_and_is_told_why(register, monkeypatch, caplog):
    for name, value in WANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "sglang", None)
    register()
    assert "Equipoise leaves this engine alone" in caplog.text


def test_settings_come_from_the_environment():
    settings = settings_from({**WANTED, "EQUIPOISE_MODE": "observe", "EQUIPOISE_WORKER": "w"})
    assert settings is not None
    assert (settings.pool, settings.mode, settings.worker) == ("p", Mode.OBSERVE, "w")
    assert settings_from({}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"EQUIPOISE_POOL": ""}, "set both"),
        ({"EQUIPOISE_BALANCER": ""}, "set both"),
        ({"EQUIPOISE_MODE": "dry"}, "set it to balance or observe"),
        ({"EQUIPOISE_BALANCER": "nowhere"}, "EQUIPOISE_BALANCER"),
        ({"EQUIPOISE_LISTEN": "0.0.0.0:0"}, "other machines can reach"),
        ({"EQUIPOISE_TLS_CERT": "c"}, "go together"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(UnsupportedEngineError, match=message):
        settings_from(WANTED | changes)


def test_the_distribution_has_every_module_that_the_plugins_import():
    script = (
        "import sys, importlib;"
        "[importlib.import_module(f'equipoise.engines.{name}') for name in ('vllm', 'sglang')];"
        "print('\\n'.join(m.__file__ for n, m in sys.modules.items() if n.startswith('equipoise')"
        " and getattr(m, '__file__', None)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "engine/pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    places = [(ROOT / "engine" / path).resolve() for path in included]
    assert all(place.exists() for place in places)
    missing = [
        file
        for file in map(Path, told.stdout.split())
        if not any(file == place or place in file.parents for place in places)
    ]
    assert missing == []


def test_both_distributions_have_one_version():
    projects = [
        tomllib.loads((ROOT / path).read_text())["project"]
        for path in ("pyproject.toml", "engine/pyproject.toml")
    ]
    assert projects[0]["version"] == projects[1]["version"]


def test_a_release_that_the_plugin_does_not_fit_serves_by_itself(caplog):
    settings = settings_from(WANTED)
    passes = []
    hooks = sglang.Hooks(settings)
    for _ in range(2):
        hooks.end_pass(passes.append, "manager")
    assert passes == ["manager"] * 2
    assert hooks.seat is None
    assert vllm._take_seat(object(), settings) is None
    assert caplog.text.count("the plugin does not fit this release") == 2
