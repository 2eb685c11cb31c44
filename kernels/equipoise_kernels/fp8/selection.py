"""Which backend computes each operation: resolved once per process, logged, queryable.

Owns the choice, not the backends. EQUIPOISE_KERNELS says what is wanted:

    auto                        the best backend that can run here (the default)
    triton | reference | ...    that backend for every operation that has it
    auto,gemm=reference         exceptions for single operations

A backend can run here if its library is installed, the device is one it was written for, and it
agrees with the reference on one small problem (`self_test`). What was asked for by name and cannot
run is an error; `auto` passes it over and keeps the reason. Ranks of a pool must choose alike, or
their results differ in the last bits: `agreed` chooses from what all of them could run.

Tensors on the CPU are computed by the reference whatever was chosen, unless Triton interprets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from equipoise_kernels.errors import KernelsUnavailableError
from equipoise_kernels.fp8.jit import is_interpreting

VARIABLE = "EQUIPOISE_KERNELS"
AUTO = "auto"
REFERENCE = "reference"

# Backends of each operation, best first. Libraries win large dense products, Triton nearly all the
# rest. FlashInfer plans every step on the host, so it is for who asks for it.
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
        "row_order": ("triton", REFERENCE),
        "permute": ("triton", REFERENCE),
        "combine": ("triton", REFERENCE),
        "latent_write": ("triton", REFERENCE),
        "mla_decode": ("flash_mla", "triton", "flashinfer", REFERENCE),
    }
)

Obstacle = Callable[[str, str], str | None]
"""Why a backend cannot compute an operation here, or None: (operation, backend) -> reason."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The choice of a process.

    Attributes:
        backends: by operation.
        possible: by operation, every backend that can run here, best first.
        obstacles: why others cannot, by "operation=backend".
    """

    backends: Mapping[str, str]
    possible: Mapping[str, tuple[str, ...]]
    obstacles: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{operation}={name}" for operation, name in self.backends.items())


def resolve(setting: str, obstacle: Obstacle) -> Selection:
    """Choose a backend for every operation.

    Args:
        setting: as EQUIPOISE_KERNELS has it.
        obstacle: why a backend cannot compute an operation here, or None.

    Raises:
        KernelsUnavailableError: the setting names what does not exist or cannot run here.
    """
    wanted = _wanted(setting)
    backends: dict[str, str] = {}
    possible: dict[str, tuple[str, ...]] = {}
    obstacles: dict[str, str] = {}
    for operation, names in OPERATIONS.items():
        name = wanted[operation]
        # Asked for by name, a backend is tried alone: nobody waits for self-tests of the others.
        tried = names if name == AUTO else (name,)
        reasons = {tried_name: obstacle(operation, tried_name) for tried_name in tried}
        obstacles |= {f"{operation}={n}": reason for n, reason in reasons.items() if reason}
        possible[operation] = tuple(n for n in tried if not reasons[n])
        if not possible[operation]:
            raise KernelsUnavailableError(
                f"{VARIABLE}={setting}: {operation} cannot run on {name}, because {reasons[name]}; "
                f"set {VARIABLE}={AUTO} to use what can"
            )
        backends[operation] = possible[operation][0]
    return Selection(backends=backends, possible=possible, obstacles=obstacles)


def agreed(selections: Sequence[Selection]) -> Selection:
    """The choice that every rank makes, given those of all ranks in any order.

    Raises:
        KernelsUnavailableError: ranks share no backend for an operation, which happens only where
            backends were asked for by name.
    """
    first = selections[0]
    possible = {}
    for operation, names in first.possible.items():
        shared = [n for n in names if all(n in other.possible[operation] for other in selections)]
        if not shared:
            each = sorted({str(other.possible[operation]) for other in selections})
            raise KernelsUnavailableError(
                f"ranks share no backend for {operation} ({'; '.join(each)}): "
                f"give all of them the same {VARIABLE}"
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
    """The choice if some backends are left out: reasons by "operation=backend".

    Raises:
        KernelsUnavailableError: nothing is left for an operation, as its only backend was asked for
            by name.
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
                f"{VARIABLE}={AUTO} to use what can"
            )
    return Selection(
        backends={operation: names[0] for operation, names in possible.items()},
        possible=possible,
        obstacles={**selection.obstacles, **reasons},
    )


class Process:
    """The choice of this process: made at the first use, or given by `adopt`."""

    _selection: Selection | None = None
    _resolved: Selection | None = None

    @classmethod
    def selection(cls) -> Selection:
        """The choice; the first call resolves EQUIPOISE_KERNELS and logs the outcome.

        That call compiles kernels and waits for the device: make it at start-up, never while a
        CUDA graph is captured.
        """
        if cls._selection is None:
            # Self-tests run the operations, which ask this module.
            from equipoise_kernels.fp8.self_test import obstacle  # noqa: PLC0415

            cls._resolved = resolve(os.environ.get(VARIABLE, AUTO), obstacle)
            cls.adopt(cls._resolved)
        assert cls._selection is not None
        return cls._selection

    @classmethod
    def resolved(cls) -> Selection:
        """What this process can run by itself, whatever was adopted since: to agree from anew."""
        return cls._resolved or cls.selection()

    @classmethod
    def leave_out(cls, reasons: Mapping[str, str]) -> None:
        """Never use some backends here, because of what is computed: see `without`.

        To be called before ranks agree.

        Raises:
            KernelsUnavailableError: one of them was asked for by name.
        """
        chosen = without(cls.selection(), reasons)
        cls._resolved = without(cls.resolved(), reasons)
        cls.adopt(chosen)

    @classmethod
    def in_use(cls) -> str:
        """The choice in words; empty before there is one."""
        backends = cls._selection.backends if cls._selection else {}
        return ", ".join(f"{operation}={backends[operation]}" for operation in sorted(backends))

    @classmethod
    def adopt(cls, selection: Selection) -> None:
        """Use a choice from now on: that which all ranks agreed on."""
        if cls._selection == selection:
            return
        cls._selection = selection
        _log.info("kernels: %s", selection)
        for what, reason in selection.obstacles.items():
            _log.info("kernels: not %s: %s", what, reason)


def backend(operation: str, device: torch.device) -> str:
    """Name of the backend that computes an operation on tensors of a device."""
    if device.type == "cpu" and not is_interpreting():
        return REFERENCE
    return Process.selection().backends[operation]


def _wanted(setting: str) -> dict[str, str]:
    """Backend or `auto` of every operation."""
    default, exceptions = AUTO, {}
    for item in filter(None, (part.strip() for part in setting.split(","))):
        operation, equals, name = item.partition("=")
        if not equals:
            default = item
        elif operation in OPERATIONS and name in {AUTO, *OPERATIONS[operation]}:
            exceptions[operation] = name
        else:
            raise KernelsUnavailableError(f"{VARIABLE}: {item!r} is none of {_choices()}")
    if default != AUTO and not any(default in names for names in OPERATIONS.values()):
        raise KernelsUnavailableError(
            f"{VARIABLE}: {default!r} is none of {AUTO}, {', '.join(_all_backends())}"
        )
    return {
        operation: exceptions.get(operation, default if default in names else AUTO)
        for operation, names in OPERATIONS.items()
    }


def _all_backends() -> list[str]:
    return sorted({name for names in OPERATIONS.values() for name in names})


def _choices() -> str:
    return "; ".join(f"{op}={'|'.join((AUTO, *names))}" for op, names in OPERATIONS.items())
