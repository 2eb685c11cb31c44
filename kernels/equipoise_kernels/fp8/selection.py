"""Which backend computes each operation: decided once per process, at start-up.

EQUIPOISE_KERNELS states what is wanted:

    auto                        the best backend that can run here (the default)
    triton | reference | ...    that backend, for every operation that has it
    auto,gemm=reference         exceptions for single operations

A start-up calls `start(resolve(setting, obstacle))`. The caller supplies the obstacle: `self_test`
has the real one, which requires the library, the device the backend was written for, and agreement
with the reference on a small problem. A backend named in the setting that cannot run is an error;
`auto` skips it and keeps the reason. Ranks of a pool must select the same, or their results differ
in the last bits: `agree` selects from what all of them can run.

CPU tensors always use the reference, unless kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from equipoise_kernels.errors import KernelsUnavailableError
from equipoise_kernels.fp8.jit import is_interpreting

VARIABLE = "EQUIPOISE_KERNELS"
AUTO = "auto"
REFERENCE = "reference"

# Best first. Libraries are fastest at large dense products, Triton at nearly everything else.
# FlashInfer plans every step on the host, so `auto` never selects it.
OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "group_quant": ("triton", REFERENCE),
        "rms_norm_quant": ("triton", REFERENCE),
        "silu_mul_quant": ("triton", REFERENCE),
        "weight_quant": ("triton", REFERENCE),
        "gemm": ("triton", REFERENCE),
        "gemm_large": ("deep_gemm", "scaled_mm", "triton", REFERENCE),
        "grouped_gemm": ("triton", REFERENCE),
        "all_to_all": ("deep_ep", "triton", REFERENCE),
        "route": ("triton", REFERENCE),
        "replica_balance": ("triton", REFERENCE),
        "row_order": ("triton", REFERENCE),
        "permute": ("triton", REFERENCE),
        "combine": ("triton", REFERENCE),
        "latent_write": ("triton", REFERENCE),
        "mla_decode": ("flash_mla", "triton", "flashinfer", REFERENCE),
        "mla_prefill": ("triton", REFERENCE),
    }
)

Obstacle = Callable[[str, str], str | None]
"""Why a backend cannot compute an operation here, or None: (operation, backend) -> reason."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The backends of a process."""

    backends: Mapping[str, str]
    """The selected backend of each operation."""
    possible: Mapping[str, tuple[str, ...]]
    """Every backend that can run here, best first, by operation."""
    obstacles: Mapping[str, str]
    """Why the other backends cannot run, by "operation=backend"."""

    def __str__(self) -> str:
        return ", ".join(f"{operation}={name}" for operation, name in self.backends.items())


def missing_library(module: str, *names: str) -> str | None:
    """Why a library cannot be used, or None; `names` are what it must have, dotted if nested."""
    try:
        library = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  an extension fails to load in many ways
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    for name in names:
        try:
            operator.attrgetter(name)(library)
        except AttributeError:
            return f"this {module} has no {name}"
    return None


def resolve(setting: str, obstacle: Obstacle) -> Selection:
    """Select a backend for every operation.

    Args:
        setting: the value of EQUIPOISE_KERNELS.
        obstacle: returns why a backend cannot compute an operation here, or None.

    Raises:
        KernelsUnavailableError: the setting names a backend or an operation that does not exist, or
            a backend that cannot run here.
    """
    wanted = _wanted(setting)
    backends: dict[str, str] = {}
    possible: dict[str, tuple[str, ...]] = {}
    obstacles: dict[str, str] = {}
    for operation, names in OPERATIONS.items():
        name = wanted[operation]
        # A backend named in the setting is the only one tried: self-tests of the others take time.
        tried = names if name == AUTO else (name,)
        reasons = {tried_name: obstacle(operation, tried_name) for tried_name in tried}
        obstacles |= {f"{operation}={n}": reason for n, reason in reasons.items() if reason}
        possible[operation] = tuple(n for n in tried if not reasons[n])
        if not possible[operation]:
            raise KernelsUnavailableError(
                f"{VARIABLE}={setting}: {operation} cannot run on {name}, because {reasons[name]}; "
                f"set {VARIABLE}={AUTO} to select another"
            )
        backends[operation] = possible[operation][0]
    return Selection(backends=backends, possible=possible, obstacles=obstacles)


def agree(selections: Sequence[Selection]) -> Selection:
    """Select from what all ranks can run, given their selections in any order.

    Raises:
        KernelsUnavailableError: ranks share no backend for an operation; possible only if their
            settings name backends.
    """
    first = selections[0]
    possible = {}
    for operation, names in first.possible.items():
        shared = [n for n in names if all(n in other.possible[operation] for other in selections)]
        if not shared:
            each = sorted({str(other.possible[operation]) for other in selections})
            raise KernelsUnavailableError(
                f"ranks share no backend for {operation} ({'; '.join(each)}): "
                f"set the same {VARIABLE} on all of them"
            )
        possible[operation] = tuple(shared)
    obstacles: dict[str, str] = {}
    for other in selections:
        obstacles |= other.obstacles
    return Selection(
        backends={operation: names[0] for operation, names in possible.items()},
        possible=possible,
        obstacles=dict(sorted(obstacles.items())),
    )


def without(selection: Selection, reasons: Mapping[str, str]) -> Selection:
    """Select again without some backends, given the reasons by "operation=backend".

    Raises:
        KernelsUnavailableError: no backend is left for an operation whose setting names one.
    """
    possible = {
        operation: tuple(name for name in names if f"{operation}={name}" not in reasons)
        for operation, names in selection.possible.items()
    }
    for operation, names in possible.items():
        if not names:
            (lost,) = selection.possible[operation]
            raise KernelsUnavailableError(
                f"{operation} cannot run on {lost}, because {reasons[f'{operation}={lost}']}; set "
                f"{VARIABLE}={AUTO} to select another"
            )
    return Selection(
        backends={operation: names[0] for operation, names in possible.items()},
        possible=possible,
        obstacles={**selection.obstacles, **reasons},
    )


@dataclass(slots=True)
class _Process:
    own: Selection | None = None
    """What this process can run by itself."""
    current: Selection | None = None
    """The selection in use: the process's own, or the one all ranks agreed on."""


_process = _Process()


def start(selection: Selection) -> None:
    """Use a selection in this process; call once, at start-up.

    Its self-tests compile kernels and wait for the device, so resolve it before serving
    and never during a CUDA graph capture.
    """
    _process.own = selection
    adopt(selection)


def is_started() -> bool:
    """Whether this process has a selection."""
    return _process.current is not None


def adopt(selection: Selection) -> None:
    """Use the selection that all ranks agreed on, from now on."""
    if _process.current == selection:
        return
    _process.current = selection
    _log.info("kernels: %s", selection)
    for name, reason in selection.obstacles.items():
        _log.info("kernels: not %s: %s", name, reason)


def exclude(reasons: Mapping[str, str]) -> None:
    """Stop using some backends because of the model at hand; see `without`.

    Call it before ranks agree.

    Raises:
        KernelsUnavailableError: the setting names one of them.
    """
    chosen = without(current(), reasons)
    _process.own = without(own(), reasons)
    adopt(chosen)


def own() -> Selection:
    """What this process can run by itself; ranks that meet again agree from this."""
    assert _process.own is not None, "no backends are selected: call selection.start() at start-up"
    return _process.own


def current() -> Selection:
    """The selection in use."""
    current = _process.current
    assert current is not None, "no backends are selected: call selection.start() at start-up"
    return current


def summary() -> str:
    """The selection in use, one line in a fixed order; empty before `start`."""
    backends = _process.current.backends if _process.current else {}
    return ", ".join(f"{operation}={backends[operation]}" for operation in sorted(backends))


def backend(operation: str, device: torch.device) -> str:
    """Name of the backend that computes an operation on a device's tensors.

    Before `start`, the reference on a CPU.
    """
    if device.type == "cpu" and (_process.current is None or not is_interpreting()):
        return REFERENCE
    return current().backends[operation]


def _wanted(setting: str) -> dict[str, str]:
    """The setting for each operation: a backend or `auto`."""
    default, exceptions = AUTO, {}
    for item in filter(None, (part.strip() for part in setting.split(","))):
        operation, equals, name = item.partition("=")
        if not equals:
            default = item
        elif operation in OPERATIONS and name in {AUTO, *OPERATIONS[operation]}:
            exceptions[operation] = name
        else:
            raise KernelsUnavailableError(f"{VARIABLE}: {item!r} is not one of {_choices()}")
    if default != AUTO and not any(default in names for names in OPERATIONS.values()):
        known = ", ".join(sorted(set().union(*OPERATIONS.values())))
        raise KernelsUnavailableError(f"{VARIABLE}: {default!r} is not one of {AUTO}, {known}")
    return {
        operation: exceptions.get(operation, default if default in names else AUTO)
        for operation, names in OPERATIONS.items()
    }


def _choices() -> str:
    return "; ".join(f"{op}={'|'.join((AUTO, *names))}" for op, names in OPERATIONS.items())
