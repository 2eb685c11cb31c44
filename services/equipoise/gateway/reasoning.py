"""`ReasoningSplit`: parts a text into the model's reasoning and its answer as it arrives."""

from enum import StrEnum

from equipoise.gateway.stop_text import StopText

REASONING_END = "</think>"
"""Text that ends reasoning."""


class ReasoningParser(StrEnum):
    """How a model marks its reasoning, by the names of vLLM's parsers."""

    NONE = "none"
    """Not at all."""

    DEEPSEEK_R1 = "deepseek_r1"
    """It ends with </think>."""


class ReasoningSplit:
    """Parts a text at the first `</think>`, as DeepSeek-R1 writes it.

    The text begins with reasoning, after an optional `<think>`, which chat templates may put into
    the prompt. A text without `</think>` is reasoning alone.
    """

    def __init__(self) -> None:
        self._before = StopText((REASONING_END,))
        self._begin: str | None = ""
        self._is_answer_begun = False

    def read(self, text: str, *, final: bool) -> tuple[str, str]:
        """The reasoning and the answer in the next part of the text."""
        if self._before.stopped:
            return "", self._answer(text)
        reasoning, answer = self._before.split(text, final=final)
        return self._without_tag(reasoning, final=final), self._answer(answer)

    def _without_tag(self, text: str, *, final: bool) -> str:
        """Reasoning without `<think>` and white space at its beginning."""
        if self._begin is None:
            return text
        self._begin += text
        begin = self._begin.lstrip()
        rest = begin.removeprefix("<think>").lstrip()
        may_grow = not final and not self._before.stopped
        if may_grow and (not rest or "<think>".startswith(begin)):
            return ""
        self._begin = None
        return rest

    def _answer(self, text: str) -> str:
        """The answer without white space at its beginning."""
        if not self._is_answer_begun:
            text = text.lstrip()
            self._is_answer_begun = bool(text)
        return text
