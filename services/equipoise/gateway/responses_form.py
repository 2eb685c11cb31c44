"""`ResponseBuilder`: the objects and events of `/v1/responses`, in OpenAI's order. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.gateway.choice import ChoiceDelta
from equipoise.gateway.errors import RequestError
from equipoise.gateway.openai_responses import ResponseContext
from equipoise.gateway.tool_calls import CallDelta
from equipoise.wire.inference_messages import FinishReason

Event = dict[str, Any]

_DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
"""Fields of a response that repeat its request's, and what they are without."""

REPEATED_FIELDS = frozenset(_DEFAULTS)
"""Fields of a request that its response repeats."""


@dataclass(slots=True, kw_only=True)
class _Item:
    """An item of the output that is still being generated."""

    kind: str
    """`reasoning`, `message` or `function_call`."""

    index: int
    """Its place in the output."""

    body: dict[str, Any]
    """The item as it was begun."""

    call: int = -1
    """The number of its call."""

    text: str = ""
    """Its text or arguments so far."""

    @property
    def place(self) -> dict[str, Any]:
        """How events refer to it."""
        part = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.body["id"], "output_index": self.index, **part}


class ResponseBuilder:
    """Builds one response from its deltas."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._num_events = 0
        self._num_tokens = self._num_reasoning = self._num_cached = 0
        self._is_answering = not context.request.splits_reasoning

    def begin(self) -> list[Event]:
        """The events before the first delta."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def read(self, delta: ChoiceDelta) -> list[Event]:
        """The events of a delta; the last one ends the response."""
        self._count(delta)
        events: list[Event] = []
        if delta.reasoning:
            events += self._add("reasoning", delta.reasoning)
        # Text may follow the end of an open call, and precede a new one.
        open_calls = [call for call in delta.calls if call.name is None]
        for call in open_calls:
            events += self._add_call(call)
        if delta.text:
            events += self._add("message", delta.text)
        for call in delta.calls[len(open_calls) :]:
            events += self._add_call(call)
        if delta.finish is not None:
            events += self._finish(delta.finish)
        return events

    def error(self, error: RequestError) -> Event:
        """The event that ends a response which failed."""
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _count(self, delta: ChoiceDelta) -> None:
        if delta.prompt is not None:
            self._num_cached = delta.prompt.num_cached
        self._num_tokens += len(delta.tokens)
        # Ranks report a token or two at a time; the end of reasoning counts as reasoning.
        self._is_answering |= bool(delta.text or delta.calls)
        if not self._is_answering:
            self._num_reasoning = self._num_tokens

    def _finish(self, finish: FinishReason) -> list[Event]:
        is_complete = finish is not FinishReason.LENGTH
        status = "completed" if is_complete else "incomplete"
        events = self._close(status)
        response = self._response(status)
        return [*events, self._event(f"response.{status}", response=response)]

    def _add(self, kind: str, text: str) -> list[Event]:
        """Text of reasoning or of a message."""
        events = []
        if self._item is None or self._item.kind != kind:
            own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            events += self._open(kind, "rs" if kind == "reasoning" else "msg", content=[], **own)
            assert self._item is not None
            part = self._part(self._item, "")
            events.append(self._event("response.content_part.added", self._item, part=part))
        assert self._item is not None
        self._item.text += text
        return [*events, self._text_event("delta", delta=text)]

    def _add_call(self, call: CallDelta) -> list[Event]:
        events = []
        if call.name is not None:
            call_id = self._context.call_id(0, call)
            own = {"call_id": call_id, "name": call.name, "arguments": ""}
            events += self._open("function_call", "fc", call=call.index, **own)
        assert self._item is not None
        assert self._item.call == call.index
        if call.arguments:
            self._item.text += call.arguments
            events.append(self._text_event("delta", delta=call.arguments))
        return events

    def _open(self, kind: str, prefix: str, *, call: int = -1, **own: Any) -> list[Event]:
        events = self._close("completed")
        index = len(self._output)
        item_id = f"{prefix}_{self._context.unique}_{index}"
        body = {"type": kind, "id": item_id, "status": "in_progress", **own}
        self._item = _Item(kind=kind, index=index, body=body, call=call)
        added = self._event("response.output_item.added", output_index=index, item=body)
        return [*events, added]

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        item, self._item = self._item, None
        if item is None:
            return []
        if item.kind == "function_call":
            end = {"arguments": item.text}
            events = [self._text_event("done", item, name=item.body["name"], **end)]
            whole = {**item.body, "status": status, **end}
        else:
            part = self._part(item, item.text)
            events = [
                self._text_event("done", item, text=item.text),
                self._event("response.content_part.done", item, part=part),
            ]
            whole = {**item.body, "status": status, "content": [part]}
        self._output.append(whole)
        done = self._event("response.output_item.done", output_index=item.index, item=whole)
        return [*events, done]

    def _part(self, item: _Item, text: str) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _text_event(self, stage: str, item: _Item | None = None, **fields: Any) -> Event:
        item = item or self._item
        assert item is not None
        names = {
            "reasoning": "reasoning_text",
            "message": "output_text",
            "function_call": "function_call_arguments",
        }
        if item.kind == "message":
            fields["logprobs"] = []
        return self._event(f"response.{names[item.kind]}.{stage}", item, **fields)

    def _event(self, kind: str, of: _Item | None = None, /, **fields: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        place = {} if of is None else of.place
        return {"type": kind, "sequence_number": number, **place, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        context = self._context
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": context.response_id,
            "object": "response",
            "created_at": context.created_s,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": context.model,
            "output": list(self._output),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            **_DEFAULTS,
            **context.request.repeated,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self._context.request.prompts))
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_prompt + self._num_tokens,
        }
