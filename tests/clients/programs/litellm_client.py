"""litellm: chats, streams, batches, structured output, tools, and completions."""

import json
import sys

import litellm
from pydantic import BaseModel

litellm.num_retries = 0


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
where = {"api_base": f"{sys.argv[1]}/v1", "api_key": "any"}
chats, texts = {"model": "openai/tiny", **where}, {"model": "text-completion-openai/tiny", **where}
asked = [{"role": "user", "content": "def f("}]
greedy = {"temperature": 0, "max_tokens": 16}

whole = litellm.completion(**chats, **greedy, messages=asked).choices[0].message.content
stream = litellm.completion(**chats, **greedy, messages=asked, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in stream) == whole
batch = litellm.batch_completion(**chats, **greedy, messages=[asked, asked, asked])
assert [one.choices[0].message.content for one in batch] == [whole] * 3

drawn = {"temperature": 1, "seed": 1, "max_tokens": 300}
parsed = litellm.completion(**chats, **drawn, messages=asked, response_format=Answer)
Answer.model_validate_json(parsed.choices[0].message.content)
called = litellm.completion(
    **chats,
    **drawn,
    messages=asked,
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
)
(call,) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["city"] in {"Rome", "Oslo"}
result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
turns = [*asked, called.choices[0].message, result]
assert litellm.completion(**chats, **greedy, messages=turns).choices[0].message is not None

text = litellm.text_completion(**texts, **greedy, prompt="def f(").choices[0].text
stream = litellm.text_completion(**texts, **greedy, prompt="def f(", stream=True)
assert "".join(part.choices[0].text or "" for part in stream) == text
print("ok")
