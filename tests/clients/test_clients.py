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


NUM_REQUESTS, NUM_TOKENS = 24, 8


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
async def test_vllms_benchmark_counts_every_token(run, url, checkpoint, tmp_path, backend, path):
    await run(
        "vllm", "python", HERE / "programs" / "vllm_bench.py",
        "--backend", backend, "--base-url", url, "--endpoint", path, "--model", "tiny",
        "--tokenizer", checkpoint, "--dataset-name", "random", "--random-input-len", "40",
        "--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_REQUESTS),
        "--max-concurrency", "6", "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--save-result", "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_guidellm_counts_every_token(run, url, checkpoint, tmp_path, path):
    await run(
        "guidellm", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model=tiny,request_format={path}",
        "--tokenizer", f"kind=hf_auto,model={checkpoint}",
        "--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--output", f"kind=json,path={tmp_path / 'result.json'}",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    made = benchmark["metrics"]["output_token_count"]["successful"]
    assert made["total_sum"] == NUM_REQUESTS * NUM_TOKENS


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
