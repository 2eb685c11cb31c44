"""`Recording`: recorded loads, independent of the file format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from equipoise.formats.errors import FormatError
from equipoise.planning.arrays import Load

_MAX_ASSIGNMENTS = 2.0**53  # beyond this a float64 does not hold every whole number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """Windows of loads, in order of time.

    Raises:
        FormatError: nothing was recorded, or a load is not a finite number of 0 or more; the
            message numbers layers like the file.
    """

    windows: Load
    """float64 [windows, layers, experts], MoE layers only. Made read-only."""
    names: tuple[str, ...]
    """Unique name of each window, such as "code/0"."""
    first_moe_layer: int | None = None
    """Number of row 0 in the model; None if the file counts MoE layers only."""
    top_k: int | None = None
    """Experts per token, if known."""

    def __post_init__(self) -> None:
        windows = np.array(self.windows, dtype=np.float64)
        windows.flags.writeable = False
        object.__setattr__(self, "windows", windows)
        assert windows.ndim == 3, "loads are [windows, layers, experts]"
        assert len(windows) == len(set(self.names)), "one unique name per window"
        _check_values(self)

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return int(self.windows.shape[0])

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return int(self.windows.shape[1])

    @property
    def num_experts(self) -> int:
        """Logical experts per layer."""
        return int(self.windows.shape[2])

    def total(self) -> Load:
        """Sum the loads of all windows, [layers, experts]."""
        total: Load = self.windows.sum(axis=0)
        return total

    def only(self, names: Sequence[str]) -> Self:
        """Select windows by name, or by the part before the slash, such as "code" for "code/0".

        Each window appears once.

        Raises:
            FormatError: a name matches no window, or the selection has no load.
        """
        matched: list[int] = []
        for name in names:
            matches = [
                index
                for index, window in enumerate(self.names)
                if name in {window, window.partition("/")[0]}
            ]
            if not matches:
                raise FormatError(
                    f"no window is named {name!r}; the windows are {', '.join(self.names[:12])}"
                    f"{' ...' if self.num_windows > 12 else ''}"
                )
            matched += matches
        chosen = list(dict.fromkeys(matched))
        return replace(
            self, windows=self.windows[chosen], names=tuple(self.names[index] for index in chosen)
        )

    def from_layer(self, first_moe_layer: int) -> Self:
        """Remove the rows of dense layers, those below `first_moe_layer`.

        Raises:
            FormatError: such a row has load, or no row is left.
        """
        assert self.first_moe_layer is not None, "layers are counted over the whole model"
        num_dense = first_moe_layer - self.first_moe_layer
        if num_dense < 0:
            raise FormatError(
                f"the first layer is {self.first_moe_layer}, so the first MoE layer cannot be "
                f"{first_moe_layer}"
            )
        if num_dense >= self.num_layers:
            raise FormatError(
                f"the last layer is {self.first_moe_layer + self.num_layers - 1}, so the first MoE "
                f"layer cannot be {first_moe_layer}"
            )
        loaded = np.argwhere(self.windows[:, :num_dense])
        if len(loaded):
            _, row, expert = (int(index) for index in loaded[0])
            raise FormatError(
                f"layer {self.first_moe_layer + row}, expert {expert} has load, so the first MoE "
                f"layer is not {first_moe_layer}"
            )
        return replace(self, windows=self.windows[:, num_dense:], first_moe_layer=first_moe_layer)

    def num_leading_idle(self) -> int:
        """Count leading layers without load: the dense ones, if the file has them."""
        return int(np.argmax(self.windows.any(axis=(0, 2))))


def joined(recordings: Mapping[str, Recording]) -> Recording:
    """Concatenate the windows of several recordings of one model, named by their labels.

    Raises:
        FormatError: they differ in layers or experts.
    """
    (first_label, first), *others = recordings.items()
    for label, other in others:
        shapes = [(one.num_layers, one.num_experts) for one in (first, other)]
        if shapes[0] != shapes[1] or first.first_moe_layer != other.first_moe_layer:
            raise FormatError(
                f"{first_label} and {label} describe different models: {_shape_words(first)} "
                f"against {_shape_words(other)}"
            )
    names = [
        label if one.num_windows == 1 else f"{label}/{name}"
        for label, one in recordings.items()
        for name in one.names
    ]
    windows = np.concatenate([one.windows for one in recordings.values()])
    return replace(first, windows=windows, names=tuple(names))


def _shape_words(recording: Recording) -> str:
    start = recording.first_moe_layer
    where = "" if start is None else f" from layer {start} on"
    return f"{recording.num_layers} layers x {recording.num_experts} experts{where}"


def _check_values(recording: Recording) -> None:
    windows = recording.windows
    if not windows.size:
        raise FormatError(f"nothing was recorded: loads have the shape {list(windows.shape)}")
    with np.errstate(invalid="ignore"):
        good = (windows >= 0) & (windows <= _MAX_ASSIGNMENTS)
    if not good.all():
        window, row, expert = (int(index) for index in np.argwhere(~good)[0])
        layer = row + (recording.first_moe_layer or 0)
        value = windows[window, row, expert]
        where = f"window {recording.names[window]}, " if recording.num_windows > 1 else ""
        raise FormatError(
            f"{where}layer {layer}, expert {expert} has load {value:g}, but loads are finite "
            f"numbers from 0 to 2^53"
        )
    if not windows.any():
        raise FormatError(
            f"all loads are 0 in {recording.num_windows} window(s) of {recording.num_layers} "
            f"layers x {recording.num_experts} experts: the recorder stopped before traffic "
            f"arrived: record again"
        )
