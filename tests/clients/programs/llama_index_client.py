"""LlamaIndex: completions and chats, whole, as streams and side by side."""

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

fields = {
    "model": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "any", "temperature": 0,
    "max_tokens": 16, "max_retries": 0, "context_window": 1024,
}  # fmt: skip
complete = OpenAILike(**fields, is_chat_model=False)
text = complete.complete("def f(").text
assert text
assert "".join(part.delta for part in complete.stream_complete("def f(")) == text

chat = OpenAILike(**fields, is_chat_model=True)
messages = [ChatMessage(role="user", content="def f(")]
answer = chat.chat(messages).message
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == answer.content
assert chat.chat([*messages, answer, *messages]).message.content is not None


async def together():
    return await asyncio.gather(*(chat.achat(messages) for _ in range(4)))


assert {one.message.content for one in asyncio.run(together())} == {answer.content}
print("ok")
