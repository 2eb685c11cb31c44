"""`WatchedFiles`: files that may be replaced while we live, read again when they were."""

import os
from collections.abc import Sequence

from equipoise.trust.errors import TrustError

Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles:
    """A few small files that belong together. Looking whether they changed costs a stat each.

    Kubernetes replaces a mounted Secret by turning a link to its folder, so that inodes change.
    """

    def __init__(self, paths: Sequence[tuple[str, str]]) -> None:
        """`paths` are pairs of the setting that named a file, for people, and the file."""
        self._paths = tuple(paths)
        self._read_at: Stamp = ()

    def changed(self) -> bool:
        """Whether `read` would give something else than it did last."""
        return self._stamp() != self._read_at

    def read(self) -> tuple[bytes, ...]:
        """All contents as they are now.

        Raises:
            TrustError: a file cannot be read; names it and the setting.
        """
        stamp = self._stamp()
        contents = []
        for setting, path in self._paths:
            try:
                with open(path, "rb") as file:  # noqa: PTH123 - a path as it was given
                    contents.append(file.read())
            except OSError as error:
                raise TrustError(f"{setting} {path}: {error.strerror}") from error
        self._read_at = stamp
        return tuple(contents)

    def _stamp(self) -> Stamp:
        stamps = []
        for _, path in self._paths:
            try:
                found = os.stat(path)  # noqa: PTH116
                stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)
