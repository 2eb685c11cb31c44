"""Engines and balancers: in this process, and for `make test-engines` real ones."""

import pytest

from tests.engines.linked import BalancerThread, LinkedEngine
from tests.engines.real import Balancer, EngineProcess
from tests.engines.wheels import RELEASES


@pytest.fixture
def balancer(tmp_path, unused_tcp_port):
    one = BalancerThread(tmp_path, unused_tcp_port)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def engine_of(balancer):
    engines = []

    def make(**options):
        engines.append(LinkedEngine(balancer.port, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    """One of the releases to test, as vllm==0.33.0; its tests follow one another."""
    return request.param


@pytest.fixture(scope="module")
def engine(release):
    """A release that has been imported."""
    one = EngineProcess(release)
    yield one
    one.close()


@pytest.fixture
def real_balancer(tmp_path, unused_tcp_port):
    one = Balancer(tmp_path, unused_tcp_port)
    try:
        one.start()
        yield one
    finally:
        one.kill()


@pytest.fixture
def run_of(engine, tmp_path, unused_tcp_port):
    """Starts a run of the engine in a folder of its own, at the balancer's port unless told."""
    runs = []

    def start(*, port=unused_tcp_port, **options):
        folder = tmp_path / f"run{len(runs)}"
        folder.mkdir()
        runs.append(engine.run(folder, port=port, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
