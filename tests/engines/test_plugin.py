"""A plugin does nothing unless it is asked to, and never keeps an engine from starting."""

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from equipoise.engines import plugin, releases, sglang, vllm
from equipoise.engines.errors import UnsupportedEngineError
from equipoise.engines.logs import log_by
from equipoise.engines.settings import settings_from
from tests.engines.test_settings import WANTED

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def logger_as_before(monkeypatch):
    """`register` makes Equipoise log where vLLM does, in this process too."""
    logger = logging.getLogger("equipoise")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    logger.handlers = []
    yield
    logger.setLevel(logging.NOTSET)


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


class Noting:
    """A seat that keeps what it is told."""

    def __init__(self):
        self.noted = []

    def __getattr__(self, name):
        return lambda *tags: self.noted.append((name, *tags) if tags else name)


def test_every_worker_of_vllm_tells_its_seat_of_updates_and_of_sleep(monkeypatch):
    """Those of other platforms derive from its base class only."""

    class WorkerBase:
        def sleep(self, level):
            seat.noted.append(f"level {level}")

        def wake_up(self, tags=None):
            seat.noted.append(f"{tags}")
            if tags == ["weights", "all"]:
                raise MemoryError

    class OtherWorker(WorkerBase):
        def update_weights(self, _request):
            raise ValueError("half-way")

    monkeypatch.setitem(
        sys.modules, "vllm.v1.worker.worker_base", SimpleNamespace(WorkerBase=WorkerBase)
    )
    seat = Noting()
    vllm._watch_weights([seat])
    vllm._watch_weights([seat])  # Of a second engine in this process.
    worker = OtherWorker()
    with pytest.raises(ValueError, match="half-way"):
        worker.update_weights("request")
    worker.sleep(2)
    with pytest.raises(MemoryError):
        worker.wake_up(["weights", "all"])  # Nobody may read yet.
    worker.wake_up(["weights"])
    worker.wake_up(tags=["kv_cache"])
    assert seat.noted == [
        *("note_update", "note_release", "level 2", "['weights', 'all']"),
        *("['weights']", ("note_restore", ["weights"])),
        *("['kv_cache']", ("note_restore", ["kv_cache"])),
    ]


def test_a_release_of_vllm_whose_updates_are_not_noticed_at_once_is_named(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base", raising=False)
    vllm._watch_weights([Noting()])
    assert "updates of the weights are noticed late" in caplog.text


def test_sglang_tells_its_seat_of_sleep():
    def fail(*_args):
        raise MemoryError

    hooks, seat = sglang.Hooks(settings_from(WANTED)), Noting()
    hooks._seat = seat
    with pytest.raises(MemoryError):
        hooks.note_restore(fail, "updater", SimpleNamespace(tags=None))
    assert seat.noted == []
    for tags in (["kv_cache"], ["kv_cache", "weights"], None):
        request = SimpleNamespace(tags=tags)
        for hook in (hooks.note_release, hooks.note_restore):
            assert hook(lambda _updater, one: one.tags, "updater", request) == tags
    assert seat.noted == [
        (name, tags)
        for tags in (["kv_cache"], ["kv_cache", "weights"], None)
        for name in ("note_release", "note_restore")
    ]


@pytest.mark.parametrize("name", ["vllm", ""])
def test_the_plugin_logs_where_its_engine_does(name, monkeypatch):
    """vLLM sets up a logger of its own name only, SGLang the root logger; both later."""
    shown, theirs = [], logging.getLogger(name)
    log_by(name)
    log_by(name)
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    level = theirs.level
    for level_of_engine in (logging.INFO, logging.ERROR):
        theirs.setLevel(level_of_engine)
        logging.getLogger("equipoise.engines.link").info("rank 0 listens on %s", "vm:1")
    theirs.setLevel(level)
    logging.getLogger("equipoise").error("Equipoise leaves this engine alone")
    assert shown == ["Equipoise: rank 0 listens on vm:1", "Equipoise leaves this engine alone"]


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


def test_the_distribution_requires_the_packages_that_its_stubs_were_compiled_for():
    """Engines bring packages of their own, and some cannot have later ones."""
    project = tomllib.loads((ROOT / "engine/pyproject.toml").read_text())["project"]
    required = dict(re.findall(r"(grpcio|protobuf)>=([\d.]+)", " ".join(project["dependencies"])))
    compiled = {"grpcio": set(), "protobuf": set()}
    for stub in (ROOT / "protos").rglob("*_pb2*.py"):
        text = stub.read_text()
        compiled["grpcio"] |= set(re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text))
        compiled["protobuf"] |= set(re.findall(r"# Protobuf Python Version: ([\d.]+)", text))
    assert compiled == {name: {version} for name, version in required.items()}


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
    assert vllm._take_seat(object(), settings, []) is None
    assert caplog.text.count("the plugin does not fit this release") == 2


def vllm_options(*, num_models=1, **changes):
    eplb = {"use_async": False, "step_interval": 10**9, "window_size": 1}
    eplb["num_redundant_experts"] = 32
    options = {"enable_elastic_ep": False}
    for name, value in changes.items():
        (eplb if name in eplb else options)[name] = value
    parallel = SimpleNamespace(eplb_config=SimpleNamespace(**eplb), **options)
    vllm._check(parallel, num_models=num_models)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"num_models": 2}, "draft model"),
        ({"enable_elastic_ep": True}, "remove --enable-elastic-ep"),
        ({"use_async": True}, '--eplb-config \'{"num_redundant_experts": 32, "window_size": 1'),
        ({"step_interval": 3000}, "--eplb-config"),
        ({"window_size": 1000}, "--eplb-config"),
    ],
)
def test_a_vllm_with_an_option_that_does_not_fit_is_left_alone_by_name(changes, remedy):
    vllm_options()
    with pytest.raises(UnsupportedEngineError, match=re.escape(remedy)):
        vllm_options(**changes)


def sglang_options(monkeypatch, *, release="0.5.23", size=4, **changes):
    """Check the options of a release, which keeps them in a place of its own."""
    monkeypatch.setattr(sglang.dist, "get_world_size", lambda: size)
    parallel = {"moe_ep_rank": 0, "moe_ep_size": 4, "pp_rank": 0, "pp_size": 1}
    options = {
        "eplb_rebalance_num_iterations": 10**9,
        "ep_num_redundant_experts": 32,
        "expert_distribution_recorder_buffer_size": 1,
        "expert_distribution_recorder_mode": "stat",
        "ep_dispatch_algorithm": "dynamic",
        "elastic_ep_backend": None,
    }
    for name, value in changes.items():
        (options if name in options else parallel)[name] = value
    options, parallel = SimpleNamespace(**options), SimpleNamespace(**parallel)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    manager = SimpleNamespace(_get_model=lambda: "model")
    if release == "0.5.11":
        runner = SimpleNamespace(server_args=options, model="model", **vars(parallel))
        manager = SimpleNamespace(_model_runner=runner, _server_args=options)
    elif release == "0.5.16":
        manager._server_args = options
    else:
        context.get_exec = lambda: SimpleNamespace(moe=options)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    found = sglang._places(manager)
    assert found.model == "model"
    sglang._check(found.options, found.parallel)


RELEASES = pytest.mark.parametrize("release", ["0.5.11", "0.5.16", "0.5.23"])


@RELEASES
@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"eplb_rebalance_num_iterations": 1000}, "--eplb-rebalance-num-iterations 1000000000"),
        ({"expert_distribution_recorder_buffer_size": 50}, "recorder-buffer-size 1"),
        ({"expert_distribution_recorder_buffer_size": 50}, "--ep-num-redundant-experts 32 --"),
        ({"expert_distribution_recorder_mode": "per_pass"}, "counts no loads: use stat"),
        ({"ep_dispatch_algorithm": "lp"}, "use dynamic"),
        ({"elastic_ep_backend": "mooncake"}, "remove --elastic-ep-backend"),
        ({"size": 8}, "--ep-size 8"),
        ({"size": 16, "pp_size": 2}, "only 4 of 8 ranks share experts: set --ep-size 8"),
    ],
)
def test_an_sglang_with_an_option_that_does_not_fit_is_left_alone_by_name(
    changes, remedy, release, monkeypatch
):
    sglang_options(monkeypatch, release=release)
    sglang_options(monkeypatch, release=release, size=8, pp_size=2)
    with pytest.raises(UnsupportedEngineError, match=re.escape(remedy)):
        sglang_options(monkeypatch, release=release, **changes)


@pytest.mark.parametrize("manager", [SimpleNamespace(), SimpleNamespace(_get_model=None)])
def test_an_sglang_whose_options_are_elsewhere_is_left_alone_by_name(manager, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace())
    with pytest.raises(UnsupportedEngineError, match=re.escape("install 0.5.23")):
        sglang._places(manager)


class EplbState:
    def step(self, is_dummy=False, is_profile=False, log_stats=False):
        pass

    def _should_record_current_step(self, log_stats=False):
        pass


class OtherState(EplbState):
    def step(self, is_dummy=False):
        pass


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("0.19.2", "vLLM 0.19.2 is too old: install 0.20 or later"),
        ("dev", "the version of vLLM is unknown: dev is not a release"),
        (None, "the version of vLLM is unknown: No package metadata was found for vllm"),
        ("0.34.0", "EplbState.step of vLLM 0.34.0 takes ('self', 'is_dummy'), not"),
    ],
)
def test_a_vllm_release_that_differs_is_left_alone_by_name(release, message, installed, caplog):
    installed(release, "vllm.distributed.eplb.eplb_state", EplbState=OtherState)
    step = OtherState.step
    vllm.register()
    assert f"Equipoise leaves this engine alone: {message}" in caplog.text
    assert OtherState.step is step


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("0.5.10.post1", "SGLang 0.5.10.post1 is too old: install 0.5.11 or later"),
        ("main", "the version of SGLang is unknown: main is not a release"),
    ],
)
def test_an_sglang_release_that_differs_is_left_alone_by_name(release, message, installed, caplog):
    installed(release, "sglang")
    sglang.register()
    assert f"Equipoise leaves this engine alone: {message}" in caplog.text


def test_a_plugin_that_is_loaded_says_what_it_waits_for(installed, caplog):
    """An engine without EPLB never calls it, so that nothing else would be said."""
    state = type("State", (EplbState,), {})
    installed("0.33.0", "vllm.distributed.eplb.eplb_state", EplbState=state)
    with caplog.at_level(logging.INFO):
        vllm.register()
    assert "Equipoise: the plugin is loaded for pool p; it begins after" in caplog.text
    assert "--enable-eplb" in caplog.text
    assert state.step is not EplbState.step


@pytest.mark.parametrize("missing", ["manager", "accumulator"])
def test_an_sglang_without_what_is_hooked_is_left_alone_by_name(
    missing, installed, monkeypatch, caplog
):
    """It would apply the other hook, and the engine would be taken for idle."""
    for folder in ("sglang.srt", "sglang.srt.eplb"):
        monkeypatch.setitem(sys.modules, folder, SimpleNamespace())
    manager = SimpleNamespace(on_forward_pass_end=print)
    found = {
        "sglang.srt.eplb.eplb_manager": {"EPLBManager": manager},
        "sglang.srt.eplb.expert_distribution": {"_StatAccumulator": None},
    }
    if missing == "manager":
        found["sglang.srt.eplb.eplb_manager"] = {}
    installed("0.5.23", "sglang")
    for module, contents in found.items():
        installed("0.5.23", module, **contents)
    sglang.register()
    names = {"manager": "eplb_manager.EPLBManager", "accumulator": "_StatAccumulator.append"}
    assert re.search(rf"alone: SGLang 0.5.23 has no .*{names[missing]}.*: install", caplog.text)


@pytest.fixture
def installed(monkeypatch):
    """Have a release of an engine installed, in an environment that wants its plugin."""

    def install(release, module, **contents):
        if release is not None:
            monkeypatch.setattr(releases, "version", lambda _package: release)
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**contents))
        for name, value in WANTED.items():
            monkeypatch.setenv(name, value)

    return install


@pytest.mark.parametrize(
    ("release", "is_warned"),
    [
        ("0.5.11", False),
        ("0.5.23", False),
        ("0.5.23.post1", False),
        ("0.5.23+cu129", False),
        ("0.5.24rc1", True),
        ("0.6.0", True),
        ("1.0", True),
    ],
)
def test_a_release_later_than_those_tested_is_balanced_with_a_warning(
    release, is_warned, monkeypatch, caplog
):
    monkeypatch.setattr(releases, "version", lambda _package: release)
    check = releases.check_release
    assert check("SGLang", "sglang", oldest="0.5.11", newest="0.5.23") == release
    assert ("later than 0.5.23, the latest that this plugin was tested with" in caplog.text) is (
        is_warned
    )


def test_the_newest_releases_are_those_that_the_makefile_tests():
    (line,) = re.findall(r"^ENGINES \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split() == [f"vllm=={vllm.NEWEST}", f"sglang=={sglang.NEWEST}"]
