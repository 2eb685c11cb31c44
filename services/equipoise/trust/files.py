"""Files that are read again when they are replaced, and `ReloadedFile`, what one contains."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from equipoise.trust.errors import TrustError

_log = logging.getLogger(__name__)

Content = TypeVar("Content")
Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles:
    """A set of small files. Checking for a change costs one stat per file.

    Kubernetes updates a mounted Secret by changing a symlink to its folder, so inodes change.
    """

    def __init__(self, paths: Sequence[tuple[str, str]]) -> None:
        """`paths` are pairs of a setting's name, for error messages, and the path it holds."""
        self._paths = tuple(paths)
        self._read_at: Stamp = ()

    def changed(self) -> bool:
        """Whether a file was replaced since the last successful `read`."""
        return self._stamp() != self._read_at

    def read(self, parse: Callable[..., Content]) -> Content:
        """What `parse` makes of the current contents of all files, in order.

        Raises:
            TrustError: a file cannot be read, or `parse` raised it; they are read again next time.
        """
        stamp = self._stamp()
        contents = []
        for setting, path in self._paths:
            try:
                with open(path, "rb") as file:  # noqa: PTH123 - a path as the user wrote it
                    contents.append(file.read())
            except OSError as error:
                raise TrustError(f"{setting} {path}: {error.strerror}") from error
        content = parse(*contents)
        self._read_at = stamp
        return content

    def _stamp(self) -> Stamp:
        stamps = []
        for _, path in self._paths:
            try:
                found = os.stat(path)  # noqa: PTH116
                stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)


class ReloadedFile(Generic[Content]):
    """What a file contains; while it is unusable, what it contained last.

    Raises:
        TrustError: the file is unusable from the start.
    """

    def __init__(
        self, setting: str, path: str, *, name: str, parse: Callable[[bytes], Content]
    ) -> None:
        """`name` is that of the content, for the log; `parse` raises TrustError."""
        self._files = WatchedFiles(((setting, path),))
        self._name = name
        self._parse = parse
        self._fault = ""
        self._content = self._files.read(parse)

    def content(self) -> Content:
        """The content, parsed again if the file was replaced."""
        if self._files.changed():
            try:
                self._content, self._fault = self._files.read(self._parse), ""
                _log.info("reloaded the %s", self._name)
            except TrustError as error:
                if str(error) != self._fault:  # It is tried again with each call.
                    self._fault = str(error)
                    _log.warning("keeping the last valid %s: %s", self._name, error)
        return self._content
