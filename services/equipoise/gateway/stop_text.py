"""`StopText`: ends a text at the first of some stop strings while it is still being written."""


class StopText:
    """Lets text through up to the first stop string that is complete, which is not part of it.

    Text that may yet turn out to be the start of one is held back, so that the result does not
    depend on how the text comes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self.stopped = False
        self._stops = stops
        self._held = ""

    def read(self, text: str, *, final: bool) -> str:
        """What is known to come before any stop string; nothing after one was met."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            _, start = min(found)
            return text[:start]
        if not final:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
