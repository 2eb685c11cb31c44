"""`StopMatcher`: ends a text at the first of some stop strings, while it is still being written."""

from collections.abc import Sequence


class StopMatcher:
    """Takes a text in parts, and gives back what surely lies before a stop string.

    The stop that ends first counts (of two that end together, the longer), so the result does not
    depend on how the text was cut. What might be the beginning of a stop is held back: at most one
    character less than the longest stop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop that was found, or None."""
        return self._matched

    def feed(self, text: str) -> str:
        """The part of the text, with what was held back, that may be shown now.

        Behind a stop nothing is shown any more.
        """
        if self._matched is not None:
            return ""
        self._held += text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if ends:
            _, start, self._matched = min(ends)
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._num_held()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def flush(self) -> str:
        """What was held back, when the text ends without a stop."""
        shown, self._held = self._held, ""
        return shown

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
