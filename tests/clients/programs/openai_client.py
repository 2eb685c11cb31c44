"""OpenAI's client: models, completions, chats over several turns, streams, parsing, tools."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    ok: bool
    size: int


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "def f("}]

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", max_retries=0)
assert [model.id for model in client.models.list()] == ["tiny"]
batch = client.completions.create(
    model="tiny", prompt=["def f(", "class A"], n=2, max_tokens=8, seed=1, logprobs=2
)
assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
assert batch.usage.completion_tokens <= 32

whole = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=12, temperature=0)
with client.chat.completions.stream(
    model="tiny", messages=ASKED, max_tokens=12, temperature=0
) as stream:
    deltas = [event.delta for event in stream if event.type == "content.delta"]
assert "".join(deltas) == whole.choices[0].message.content

turns = [*ASKED, whole.choices[0].message, {"role": "user", "content": "more"}]
assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=8).choices

parsed = client.chat.completions.parse(
    model="tiny", messages=ASKED, response_format=Answer, seed=1, max_tokens=200
)
assert isinstance(parsed.choices[0].message.parsed, Answer)
turns = [*ASKED, parsed.choices[0].message, {"role": "user", "content": "more"}]
assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=8).choices
with client.chat.completions.stream(
    model="tiny", messages=ASKED, response_format=Answer, seed=1, max_tokens=200
) as stream:
    assert stream.get_final_completion().choices[0].message.parsed == (
        parsed.choices[0].message.parsed
    )

called = client.chat.completions.create(
    model="tiny", messages=ASKED, tools=[TOOL], seed=1, max_tokens=300,
    tool_choice={"type": "function", "function": {"name": "weather"}},
)  # fmt: skip
(call,) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["city"] in {"Rome", "Oslo"}
answered = client.chat.completions.create(
    model="tiny", tools=[TOOL], tool_choice="none", max_tokens=8,
    messages=[
        *ASKED, called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ],
)  # fmt: skip
assert answered.choices[0].finish_reason in {"stop", "length"}

response = client.responses.create(
    model="tiny", input="def f(", max_output_tokens=16, temperature=0
)
assert response.output_text
with client.responses.stream(
    model="tiny", input="def f(", max_output_tokens=16, temperature=0
) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
assert "".join(deltas) == response.output_text
print("ok")
