"""`KernelOperation`: what an operation's file offers, under one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from equipoise_kernels.fp8 import configurations, selection
from equipoise_kernels.fp8.specialization import Specialization

Run = TypeVar("Run")
Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelOperation(Generic[Run, Config]):
    """One operation of the FP8 data plane."""

    name: str
    """As in EQUIPOISE_KERNELS and in the files of `tuned/`."""
    backends: dict[str, Run]
    """What computes it, by name; all take the same arguments."""
    configs: tuple[Config, ...] = ()
    """Configurations that tuning may choose for its kernel, all of one dataclass, if any."""
    specializations: Callable[..., list[Specialization]]
    """Returns what its kernel compiles to: with a configuration, if it has any."""

    def on(self, device: torch.device) -> Run:
        """The backend selected for this process that computes a device's tensors."""
        return self.backends[selection.backend(self.name, device)]

    def config(self, *, rows: int, shape: tuple[int, ...] = ()) -> Config:
        """The committed configuration of a launch; see `configurations.choose`."""
        kind: Any = type(self.configs[0])
        config: Config = configurations.choose(self.name, kind, rows=rows, shape=shape)
        return config
