"""A simulated CUDA device: tensors report `cuda:0`, their numbers are on the host.

A machine without a GPU can so prove that a program copies to its device at the edges only: what
mixes the host's tensors with the device's fails as it would on a GPU, and the results are right.
Streams and events are recorded, in the order in which the program used them. For the thread that
opened it only.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from equipoise_model.device import _stream_beside

CUDA = torch.device("cuda", 0)

# These take the host's tensors beside the device's, as torch's own do.
_MAY_MIX = {"copy_", "__getitem__", "__setitem__", "index_put_"}
# These are about the tensor and not its numbers.
_ABOUT_IT = {"__get__", "requires_grad_", "dim", "size", "stride", "__len__", "numel"}
# Attributes that are tensors of their own.
_VIEWS = {"T", "mT", "H", "mH", "data"}
_TO_HOST = {"tolist", "numpy", "cpu", "item"}


class DeviceMixError(AssertionError):
    """An operation got tensors of the host and of the device."""


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; `numbers` is what it holds."""

    @staticmethod
    def __new__(cls, numbers):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=CUDA,
        )
        self.numbers = numbers
        return self

    def __repr__(self):
        return f"OnDevice({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} did not pass by the mode: was it called by another thread?")


class _Functions(TorchFunctionMode):
    """Runs what gets or makes tensors of the device on their numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__.__name__ in _VIEWS:
            name = "view"
        kwargs = kwargs or {}
        if name in _ABOUT_IT:
            return func(*args, **kwargs)
        if name == "to":
            return _moved(*args, **kwargs)
        kwargs.pop("pin_memory", None)  # Pinning needs a driver.
        flat = list(_leaves((args, kwargs)))
        there = [one for one in flat if isinstance(one, OnDevice)]
        makes = _is_cuda(kwargs.get("device"))
        if not (there or makes):
            return func(*args, **kwargs)
        if there and name not in _MAY_MIX:
            _check_all_there(name, flat)
        if makes:
            kwargs["device"] = "cpu"
        of_numbers = {id(one.numbers): one for one in there}
        result = func(*_numbers(args), **_numbers(kwargs))
        return result if name in _TO_HOST else _wrapped(result, of_numbers)


def _check_all_there(name, values):
    for one in values:
        if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice) and one.dim() > 0:
            raise DeviceMixError(f"{name} got tensors of the host and of the device")


def _leaves(value):
    """What is in nested tuples, lists and dicts. (torch's trees take most of a test's time.)"""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _mapped(change, value):
    """`value` with `change` applied to each of its leaves."""
    kind = type(value)
    if kind is dict:
        return {key: _mapped(change, one) for key, one in value.items()}
    # A `torch.Size` has no tensors; what torch returns with names is built from a sequence, too.
    if isinstance(value, tuple | list) and kind is not torch.Size:
        return kind([_mapped(change, one) for one in value])
    return change(value)


def _numbers(values):
    return _mapped(lambda one: one.numbers if isinstance(one, OnDevice) else one, values)


def _wrapped(result, of_numbers):
    """Tensors of the device; what was changed in place is the tensor that it was before."""

    def wrap(value):
        if not isinstance(value, torch.Tensor):
            return value
        return of_numbers[id(value)] if id(value) in of_numbers else OnDevice(value)

    return _mapped(wrap, result)


def _moved(tensor, *targets, device=None, dtype=None, non_blocking=False):
    """`Tensor.to`, whose targets may be a device, a dtype or a tensor."""
    del non_blocking
    for target in targets:
        if isinstance(target, torch.Tensor):
            device, dtype = target.device, target.dtype
        elif isinstance(target, torch.dtype):
            dtype = target
        else:
            device = target
    is_there = isinstance(tensor, OnDevice)
    numbers = tensor.numbers if is_there else tensor
    goes_there = is_there if device is None else _is_cuda(device)
    moved = numbers.to(dtype or numbers.dtype)
    if goes_there == is_there and moved is numbers:
        return tensor
    moved = moved.clone() if moved is numbers else moved
    return OnDevice(moved) if goes_there else moved


def _is_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


class Recorder:
    """Streams and events by name, and what the program did with them."""

    def __init__(self):
        self.log = []
        self.current = "computing"
        self._num_streams = 0

    def stream(self, _device=None):
        self._num_streams += 1
        return _Stream(f"stream {self._num_streams}", self)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self):
        return _Event(self)

    def current_stream(self, _device=None):
        return _Stream(self.current, self)


class _Stream:
    def __init__(self, name, recorder):
        self.name = name
        self._recorder = recorder

    def wait_stream(self, stream):
        self._recorder.log.append((self.name, "waits for", stream.name))

    def synchronize(self):
        self._recorder.log.append(("the host", "waits for", self.name))

    def wait_event(self, event):
        self._recorder.log.append((self.name, "waits for", event.recorded_on))


class _Event:
    def __init__(self, recorder):
        self._recorder = recorder
        self.recorded_on = None

    def record(self, stream):
        self.recorded_on = stream.name
        self._recorder.log.append((stream.name, "reaches", "its event"))


@contextmanager
def pretended_device():
    """Have a device `cuda:0` within the block; yields the `Recorder` of its streams."""
    assert not torch.cuda.is_available(), "there is a true device: use that"
    recorder, generator = Recorder(), torch.Generator
    patches = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda _device: None,
        "get_device_name": lambda _device=None: "pretended",
        "mem_get_info": lambda _device=None: (2**40, 2**40),
        "Stream": recorder.stream,
        "Event": recorder.event,
        "stream": recorder.on,
        "current_stream": recorder.current_stream,
    }
    with (
        mock.patch.multiple(torch.cuda, **patches),
        mock.patch.object(torch, "Generator", side_effect=lambda _device="cpu": generator()),
        mock.patch.object(torch.Tensor, "record_stream"),
        _Functions(),
    ):
        _stream_beside.cache_clear()
        yield recorder
    _stream_beside.cache_clear()
