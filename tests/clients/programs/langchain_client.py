"""LangChain: chats, batches, streams, tools, structured output, and completions."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer."""

    ok: bool
    size: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


where = {"base_url": f"{sys.argv[1]}/v1", "api_key": "any", "model": "tiny", "max_retries": 0}
chat = ChatOpenAI(**where, temperature=0, max_tokens=24)
alone = [chat.invoke(text).content for text in ("def f(", "class A:", "1 + 2")]
assert [one.content for one in chat.batch(["def f(", "class A:", "1 + 2"])] == alone
assert "".join(part.content for part in chat.stream("def f(")) == alone[0]
assert chat.invoke("def f(").usage_metadata["output_tokens"] > 0

drawn = ChatOpenAI(**where, temperature=1, seed=3, max_tokens=200)
for method in ("json_schema", "function_calling"):
    structured = drawn.with_structured_output(Answer, method=method)
    assert isinstance(structured.invoke("x = "), Answer), method

asked = HumanMessage("def f(")
# A string may be long: the tiny model's calls end where their tokens do.
called = drawn.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).invoke(
    [asked], max_tokens=400
)
results = [
    ToolMessage(content="rain", tool_call_id=call["id"])
    for call in [*called.tool_calls, *called.invalid_tool_calls]
]
assert len(results) == 1, called
if called.tool_calls:
    assert set(called.tool_calls[0]["args"]) == {"city"}
    assert chat.bind_tools([weather], tool_choice="none").invoke([asked, called, *results]).content

complete = OpenAI(**where, temperature=0, max_tokens=12)
texts = [complete.invoke(text) for text in ("def f(", "class A:")]
assert complete.batch(["def f(", "class A:"]) == texts
assert "".join(complete.stream("def f(")) == texts[0]
print("ok")
