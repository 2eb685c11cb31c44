"""How ranks choose who carries rows, in a group of one; several are in processes elsewhere."""

import pytest
import torch
from torch import distributed as dist

from equipoise_kernels.errors import KernelsUnavailableError
from equipoise_kernels.formats import empty_rows
from equipoise_kernels.fp8 import selection
from equipoise_kernels.fp8.all_to_all import opening, peer
from equipoise_kernels.fp8.all_to_all.collective import CollectiveBackend
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from tests.support.kernel_backends import use_backends

SHAPE = EpShape(
    rank=0, num_ranks=1, slots_per_rank=3, top_k=2, dim=128, max_tokens=3, payload=Payload.FP8
)
ABSENT = "rank 0: ModuleNotFoundError: import of deep_ep halted; None in sys.modules"


class Library(CollectiveBackend):
    """DeepEP as it should be: it does what it is asked."""

    def __init__(self, shape, *, group):
        assert group is not None
        super().__init__(shape, group=None, timeout_s=1.0)


class ForgetfulLibrary(Library):
    def begin_combine(self, y_ND, state, *, weights_TK):
        return super().begin_combine(0 * y_ND, state, weights_TK=weights_TK)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def opened(group, monkeypatch):
    """Open a buffer with these possible backends, best first."""

    def build(*possible):
        everything = selection.resolve("reference", lambda _operation, _name: None)
        chosen = selection.Selection(
            backends={**everything.backends, "all_to_all": possible[0]},
            possible={**everything.possible, "all_to_all": possible},
            obstacles={},
        )
        use_backends(monkeypatch, chosen)
        monkeypatch.setitem(__import__("sys").modules, "deep_ep", None)
        return opening.open_buffer(SHAPE, group=group, device="cpu", timeout_s=5.0)

    return build


def test_ranks_take_the_best_backend_that_carries_rows_for_all_of_them(opened, interpreted):
    chosen = opened("deep_ep", "triton", "reference")
    assert (chosen.backend, chosen.passed_over) == ("triton", {"deep_ep": ABSENT})
    assert (chosen.capture_obstacle, chosen.is_low_latency) == (None, False)
    assert chosen.shape == SHAPE


def test_ranks_wait_longer_for_one_that_compiles_while_a_buffer_is_opened(
    opened, interpreted, monkeypatch
):
    waits, raise_faults = [], peer.raise_faults

    def remember(seen, *, timeout_s, **options):
        waits.append(timeout_s)
        raise_faults(seen, timeout_s=timeout_s, **options)

    monkeypatch.setattr(peer, "raise_faults", remember)
    chosen = opened("triton")
    came = chosen.buffer.dispatch(
        empty_rows((0, 128), device="cpu"), torch.empty(0, 2, dtype=torch.int64)
    )
    assert came.rows.codes.shape == (0, 128)
    # Rows and outputs of the trial, then the rows of an exchange.
    assert waits == [60.0, 60.0, 5.0]


def test_a_library_that_works_comes_first_with_rows_and_room_as_it_has_them(opened, monkeypatch):
    monkeypatch.setattr(opening, "DeepEpBackend", Library)
    chosen = opened("deep_ep", "reference")
    assert (chosen.backend, chosen.passed_over, chosen.is_low_latency) == ("deep_ep", {}, True)
    assert (chosen.shape.payload, chosen.shape.max_tokens) == (Payload.BF16, 4)
    assert chosen.capture_obstacle is None


def test_a_library_that_loses_rows_is_passed_over(opened, monkeypatch):
    monkeypatch.setattr(opening, "DeepEpBackend", ForgetfulLibrary)
    chosen = opened("deep_ep", "reference")
    assert chosen.backend == "reference"
    assert "did not come back unchanged" in chosen.passed_over["deep_ep"]
    assert "number of rows on the host" in chosen.capture_obstacle


def test_ranks_on_several_machines_do_not_reach_each_others_memory(opened, monkeypatch):
    def told(word, *, group):
        return [word, f"{word} of another"] if word == opening._machine() else [word]

    monkeypatch.setattr(opening, "_told", told)
    chosen = opened("triton", "reference")
    assert chosen.passed_over == {"triton": "the ranks are on 2 machines"}


def test_a_group_whose_library_cannot_carry_rows_is_an_error_before_any_step(opened, monkeypatch):
    def refused(*_arguments, **_options):
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(CollectiveBackend, "begin_dispatch", refused)
    with pytest.raises(KernelsUnavailableError, match=r"reference, because.*Duplicate GPU"):
        opened("reference")


def test_a_named_backend_that_does_not_work_for_all_ranks_is_an_error(opened):
    with pytest.raises(KernelsUnavailableError, match=r"no backend of all_to_all.*halted"):
        opened("deep_ep")
    assert torch.distributed.is_initialized()
