"""Reasoning is kept apart from the answer, however the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.reasoning import ReasoningSplit
from tests.support.scripted_ranks import all_events, says


def split(parts):
    reader = ReasoningSplit()
    read = [reader.read(part, final=index == len(parts) - 1) for index, part in enumerate(parts)]
    return tuple("".join(pieces) for pieces in zip(*read, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", ("why\n", "because")),
        ("why</think>because</think>!", ("why", "because</think>!")),
        ("still thinking </thin", ("still thinking </thin", "")),
        ("<thin", ("<thin", "")),
        ("</think>", ("", "")),
        ("", ("", "")),
    ],
)
def test_the_text_is_parted_at_the_end_of_thinking(text, expected):
    assert split([text]) == expected
    assert split(list(text) or [""]) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "</think", ">", " ", "a"]), min_size=1))
def test_the_parts_do_not_depend_on_how_the_text_is_cut(parts):
    assert split(parts) == split(["".join(parts)]) == split(list("".join(parts)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_reasoning_and_answer(run_gateway, fleet, stream):
    fleet.fail(says("<think>so</think>\nyes"))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99, "stream": stream}
    async with run_gateway(
        workers=tuple(fleet.addresses), reasoning_parser="deepseek_r1"
    ) as gateway:
        path = "/v1/chat/completions"
        async with gateway.client.stream("POST", path, json=body) as response:
            if stream:
                *events, _ = await all_events(response)
            else:
                events = [await response.aread()]
        sent = json.loads(events[0])["choices"][0]
        answer = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
        again = {**body, "messages": [*body["messages"], answer], "stream": False}
        fleet.fail(says("more"))
        assert (await gateway.client.post(path, json=again)).status_code == 200
    if not stream:
        assert sent["message"]["reasoning_content"] == "so"
        assert sent["message"]["content"] == "yes"
        return
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_an_answer_that_ended_in_its_reasoning_may_be_sent_back(run_gateway, fleet):
    fleet.fail(says("why, "))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    path = "/v1/chat/completions"
    async with run_gateway(
        workers=tuple(fleet.addresses), reasoning_parser="deepseek_r1"
    ) as gateway:
        answer = (await gateway.client.post(path, json=body)).json()["choices"][0]["message"]
        assert (answer["content"], answer["reasoning_content"]) == (None, "why, ")
        of_vllm = {"role": "assistant", "content": None, "reasoning": "why, "}
        for message in (answer, of_vllm):
            more = [*body["messages"], message, {"role": "user", "content": "b"}]
            response = await gateway.client.post(path, json={**body, "messages": more})
            assert response.status_code == 200, response.text
    *_, last = [request for rank in fleet.ranks for request in rank.requests]
    assert bytes(last.prompt) == b"[user]a[assistant][user]b"


JSON = {"type": "json_object"}
CALL = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}


@pytest.mark.parametrize("fields", [{"response_format": JSON}, {"guided_regex": "x"}, CALL])
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_grammar_holds_after_reasoning(run_gateway, fleet, checkpoint, fields, thinks):
    (checkpoint / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% set _ = tools %}<think>"
        "{% if quick %}\n\n</think>\n\n{% endif %}"
    )
    fleet.fail(says("so</think>\n{}" if thinks else "{}"))
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 99,
        "chat_template_kwargs": {"quick": not thinks},
        **fields,
    }
    async with run_gateway(
        workers=tuple(fleet.addresses), reasoning_parser="deepseek_r1"
    ) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json=body)
    message = response.json()["choices"][0]["message"]
    assert message.get("reasoning_content") == ("so" if thinks else None)
    calls = message.get("tool_calls", [{"function": {"arguments": message["content"]}}])
    assert [call["function"]["arguments"] for call in calls] == ["{}"]
    (request,) = [request for rank in fleet.ranks for request in rank.requests]
    assert request.grammar.WhichOneof("kind")
    assert request.grammar.after == ("</think>" if thinks else "")


async def test_a_call_that_must_be_made_is_not_begun_by_reasoning_alone(run_gateway, fleet):
    fleet.fail(says("and so"))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99, **CALL}
    async with run_gateway(
        workers=tuple(fleet.addresses), reasoning_parser="deepseek_r1"
    ) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json=body)
    (choice,) = response.json()["choices"]
    assert choice["message"]["reasoning_content"] == "and so"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
