"""`ResponsesEndpoint`: `/v1/responses`, which keeps nothing of a response after it is sent."""

from contextlib import aclosing

from equipoise.gateway.client import HttpClient
from equipoise.gateway.completion_request import CompletionRequest
from equipoise.gateway.errors import RequestError
from equipoise.gateway.generation import GenerationEndpoint, note_failure
from equipoise.gateway.openai_responses import ResponseContext
from equipoise.gateway.responses_form import ResponseBuilder


class ResponsesEndpoint(GenerationEndpoint):
    """An ASGI application; its streams consist of named events and end with the whole response."""

    async def _whole(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        builder = ResponseBuilder(context)
        async with aclosing(self._deltas(request, context)) as deltas:
            async for _, delta in deltas:
                events = builder.read(delta)
        await client.send_json(events[-1]["response"])

    async def _stream(
        self, request: CompletionRequest, context: ResponseContext, client: HttpClient
    ) -> None:
        builder = ResponseBuilder(context)
        try:
            async with aclosing(self._deltas(request, context)) as deltas:
                async for _, delta in deltas:
                    events = builder.begin() if delta.is_first else []
                    events += builder.read(delta)
                    for event in events:
                        is_last = delta.finish is not None and event is events[-1]
                        await client.send_event(event, name=event["type"], is_last=is_last)
        except RequestError as error:
            if not client.is_streaming:
                raise
            note_failure(context.response_id, error)
            await client.send_event(builder.error(error), name="error", is_last=True)
