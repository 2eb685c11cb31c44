"""`StopText`: ends a text at its first stop string while the text is still being generated."""


class StopText:
    """Passes text on up to the first complete stop string, which is removed.

    Holds back text that may be the start of a stop string, so that the result does not depend on
    how the text is cut.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self.stopped = False
        self._stops = stops
        self._held = ""

    def read(self, text: str, *, final: bool) -> str:
        """The text that is certain to precede any stop string; empty after the first one."""
        return "" if self.stopped else self.split(text, final=final)[0]

    def split(self, text: str, *, final: bool) -> tuple[str, str]:
        """The same before the first stop string, and the text after it if it is complete now."""
        assert not self.stopped
        text, self._held = self._held + text, ""
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            end, start = min(found)
            return text[:start], text[end:]
        if not final:
            held = max((overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text, ""


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
