"""`StepProfiler`: a profiler trace of a few of a worker's steps, in a file.

The profiler runs on the engine's thread, between turns. It ends after a number of steps or a minute
and never starts again, so its memory is bounded. A thread of its own writes the file, because a
step must not wait for a disk. Ending it does hold the next step up, longer with more steps.
"""

import logging
import re
import threading
import time
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from equipoise.rank.errors import WorkerError
from equipoise.worker.settings import WorkerSettings

MAX_S = 60.0
"""A profile ends after this time, however few steps it has; also a worker without traffic does."""

_log = logging.getLogger(__name__)


class StepProfiler:
    """Profiles `num_steps` of the steps that follow a worker's first, into the file `path`.

    Used from the engine's thread, after construction.
    """

    def __init__(
        self, *, num_steps: int = 0, path: Path = Path(), device_type: str = "cpu"
    ) -> None:
        self.path = path
        """The file, which is there once it is complete."""
        self._activities = [ProfilerActivity.CPU]
        if device_type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._num_left = num_steps
        self._num_profiled = self._num_seen = 0
        self._profiler: profile | None = None
        self._began = 0.0

    @classmethod
    def of(cls, settings: WorkerSettings, *, device: torch.device) -> Self:
        """Return one that does as the settings say; its folder exists.

        Raises:
            WorkerError: the folder cannot be created.
        """
        folder = settings.profile_folder
        if folder is None or not settings.profile_steps:
            return cls()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkerError(f"profile_folder {folder}: {error.strerror}") from error
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{settings.pool}-{settings.worker}")
        path = folder / f"{name}.trace.json.gz"
        made = cls(num_steps=settings.profile_steps, path=path, device_type=device.type)
        # The first start takes seconds, for which no step may wait.
        with profile(activities=made._activities):
            pass
        return made

    def note_turn(self, num_steps: int) -> None:
        """Start or end the profile after a turn; `num_steps` counts the epoch's steps."""
        if self._profiler is not None:
            self._num_profiled += num_steps - self._num_seen
            if self._num_profiled >= self._num_left or time.monotonic() - self._began > MAX_S:
                self.close()
        elif num_steps and self._num_left:
            self._profiler = profile(activities=self._activities)
            self._profiler.start()
            self._began = time.monotonic()
        self._num_seen = num_steps

    def close(self) -> None:
        """End a profile that is under way, and start no other."""
        if self._profiler is None:
            return
        finished, self._profiler, self._num_left = self._profiler, None, 0
        finished.stop()
        # Not a daemon: the process ends after the file is complete.
        threading.Thread(target=self._write, args=(finished,), name="profile", daemon=False).start()

    def _write(self, finished: profile) -> None:
        part = self.path.with_name(f".{self.path.name}")
        try:
            finished.export_chrome_trace(str(part))
            part.replace(self.path)
        except (OSError, RuntimeError) as error:
            _log.warning("the profile cannot be written: %s", error)
            part.unlink(missing_ok=True)
        else:
            _log.info("profiled %d steps: %s", self._num_profiled, self.path)
