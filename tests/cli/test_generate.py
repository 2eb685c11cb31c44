"""A text is gone on with in the shell, by a model in this process or behind a URL."""

import asyncio
import io

import pytest

from equipoise.cli.demo.reference import ReferenceModel
from equipoise.cli.demo.traffic import Prompt
from equipoise.cli.generate.run import run
from equipoise.cli.generate.settings import GenerateSettings
from equipoise.formats.packaged import packaged_checkpoint
from equipoise.settings.errors import InvalidSettingsError
from tests.support.scripted_ranks import Fault, undisturbed

PROMPT = "def balance("


def settings(**changes):
    return GenerateSettings(**({"prompt": PROMPT, "max_tokens": 24} | changes))


def shown(capsys, **changes):
    assert run(settings(**changes)) == 0
    return capsys.readouterr().out


def test_the_model_in_this_process_makes_the_reference_models_tokens(capsys):
    prompt = Prompt(domain="code", tokens=tuple(PROMPT.encode()), max_tokens=24)
    answers = ReferenceModel.load(packaged_checkpoint()).answer([prompt])
    text = bytes(answers[prompt]).decode()
    assert shown(capsys) == text + "\n"
    assert shown(capsys, stop=(text[7:9],)) == text[: text.index(text[7:9])] + "\n"


def test_loading_progress_goes_to_stderr(capsys):
    assert run(settings(max_tokens=2)) == 0
    output = capsys.readouterr()
    assert "loaded" not in output.out
    dense, experts = output.err.splitlines()
    assert dense.startswith("loaded dense weights: 2.4 MiB in ")
    assert experts.startswith("loaded experts: 4.5 MiB in ")


def test_a_seed_gives_the_same_text_again(capsys):
    sampled = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    first = shown(capsys, seed=1, **sampled)
    assert shown(capsys, seed=1, **sampled) == first
    assert shown(capsys, seed=2, **sampled) != first


async def test_a_server_makes_the_text(server, capsys):
    assert await asyncio.to_thread(run, settings(url=server.url, temperature=0.5, top_k=3)) == 0
    assert capsys.readouterr().out == bytes(undisturbed(PROMPT.encode(), 24)).decode() + "\n"
    (request,) = server.rank.requests
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)


async def test_a_servers_fault_is_one_line(server):
    server.rank.faults.append(Fault(after=2))
    with pytest.raises(InvalidSettingsError, match="the server reports: 1 attempts failed"):
        await asyncio.to_thread(run, settings(url=f"{server.url}/v1", model="tiny"))
    with pytest.raises(InvalidSettingsError, match="the server returned 404: the model"):
        await asyncio.to_thread(run, settings(url=server.url, model="another"))


def test_a_prompt_comes_from_standard_input(monkeypatch, capsys):
    from_words = shown(capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert shown(capsys, prompt="-") == from_words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"url": "localhost"}, "--url must begin with http"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"stop": ("",)}, "--stop must not be empty"),
        ({"top_p": 3}, "--top-p = 3 is out of range"),
        ({"prompt": "\udcff"}, "not valid UTF-8"),
        ({"url": "http://127.0.0.1:1"}, "cannot reach --url http://127.0.0.1:1: "),
    ],
)
def test_invalid_settings_raise_one_sentence(changes, words):
    with pytest.raises(InvalidSettingsError, match=words):
        run(settings(**changes))
