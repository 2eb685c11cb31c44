"""Clients that others wrote, each a process of its own, against a fleet: `make test-clients`."""

import asyncio
import json

import pytest
import yaml

from tests.clients.conftest import FOLDER, HERE

pytestmark = [
    pytest.mark.clients,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not FOLDER, reason="clients are installed by make test-clients only"),
]

CONTEXTS = ("def f(", "class A:\n", "12 + ", "for x in ", "import ", "if a:", "return ", "x = [",
            "while ", "assert ")  # fmt: skip


@pytest.mark.parametrize("client", ["openai", "langchain", "llama-index", "litellm"])
async def test_a_library_gets_what_it_asks_for(client, run, url):
    program = HERE / "programs" / f"{client.replace('-', '_')}_client.py"
    assert (await run(client, "python", program, url)).endswith("ok\n")


GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def continued(fleet):
    """The most likely eight tokens after each context."""
    body = {**GREEDY, "prompt": list(CONTEXTS)}
    answer = await fleet.client.post("/v1/completions", json=body)
    return [choice["text"] for choice in answer.json()["choices"]]


async def answered(fleet):
    """The most likely eight tokens of the answer to each context."""
    bodies = [{**GREEDY, "messages": [{"role": "user", "content": one}]} for one in CONTEXTS]
    answers = [await fleet.client.post("/v1/chat/completions", json=body) for body in bodies]
    return [one.json()["choices"][0]["message"]["content"] for one in answers]


async def test_lm_eval_scores_and_generates_what_the_model_says(fleet, run, url, tmp_path):
    """The right answers are the model's own: every score is 1, unless a token is misread."""
    documents = [
        {"context": context, "right": text, "answer": answer, "choices": [text, "\u00e9", "zq"]}
        for context, text, answer in zip(
            CONTEXTS, await continued(fleet), await answered(fleet), strict=True
        )
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
    }
    generated = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\u00ff"], "max_gen_toks": 8, "ignore_eos": True},
        "metric_list": [{"metric": "exact_match"}],
    }
    tasks = {
        "scored": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        },
        "generated": {**generated, "doc_to_target": "{{right}}"},
        "answered": {**generated, "doc_to_target": "{{answer}}"},
    }
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **shared, **task}))

    async def results(model, path, *tasks, options=()):
        await run(
            "lm-eval", "lm_eval", "run", "--model", model,
            "--model_args", f"model=tiny,base_url={url}{path},num_concurrent=2,max_retries=1",
            "--tasks", *tasks, "--include_path", tmp_path, "--batch_size", "8",
            "--output_path", tmp_path / f"{model}.json", *options,
        )  # fmt: skip
        (file,) = tmp_path.glob(f"{model}*.json")
        return json.loads(file.read_text())["results"]

    found = await results("local-completions", "/v1/completions", "scored", "generated")
    assert found["scored"]["acc,none"] == 1
    assert found["generated"]["exact_match,none"] == 1
    found = await results(
        "local-chat-completions", "/v1/chat/completions", "answered",
        options=("--apply_chat_template",),
    )  # fmt: skip
    assert found["answered"]["exact_match,none"] == 1


async def test_the_fleet_still_serves(fleet):
    """No client has left a request behind."""
    await fleet.feed.until(
        lambda status: (
            not any(rank.active_requests or rank.queued_requests for rank in status.ranks)
        ),
        timeout_s=60,
    )
    texts = await asyncio.gather(continued(fleet), continued(fleet))
    assert texts[0] == texts[1]
