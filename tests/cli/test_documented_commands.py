"""The commands in the README and the docs exist, parse, and run where they need nothing else."""

import importlib.util
import re
import shlex
import shutil
from itertools import dropwhile, pairwise
from pathlib import Path

import pytest
import typer

from equipoise.cli.kubectl.plugin import parted
from equipoise.cli.main import app, main
from equipoise.formats.packaged import packaged_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
ELLIPSIS = {"…", "..."}
"""Stands for arguments that a page leaves out."""

FILES = {"--loads", "--model-config", "--current", "--file"}
RUNS_ALONE = {"plan", "replay", "whatif", "convert", "policy validate", "generate"}
SHELLS = {"", "sh", "bash", "shell", "console"}
OTHERS_MODULES = {"sglang"}


def shell_lines(page):
    """Commands in the page's blocks of shell, one per line, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for block in (text for language, text in blocks if language in SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue  # Output, such as a table with an apostrophe.
            words = list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
            if words:
                yield words


def inline_commands(page):
    """`equipoise ...` in the page's sentences and tables, with brackets and placeholders."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`(?:kubectl )?equipoise ([a-z][^`]*)`", text):
        yield code.replace("[", " ").replace("]", " ").split()


def leaf(words):
    """The command that the words lead to, its name, and the words that are left."""
    command, name, rest = typer.main.get_command(app), [], list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest[0]]
        name.append(rest.pop(0))
    return command, " ".join(name), rest


def equipoise_words(words):
    """The arguments of `equipoise` in a line of shell; None if the line calls something else."""
    if Path(words[0]).name == "equipoise":
        return words[1:]
    if words[:2] == ["kubectl", "equipoise"]:
        return list(parted(words[2:]).arguments)
    return None


def options_of(command):
    return {option for one in command.params for option in one.opts + one.secondary_opts}


def check_parses(words):
    command, name, rest = leaf(words)
    assert name, f"no command {words[0]!r}"
    if ELLIPSIS & set(rest):
        unknown = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert not unknown - options_of(command)
    else:
        command.make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_of_shell_exist_and_parse(page):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for words in shell_lines(page):
        if (arguments := equipoise_words(words)) is not None:
            check_parses(arguments)
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= set(phony), words
        elif words[:2] == ["python", "-m"] and words[2].split(".")[0] not in OTHERS_MODULES:
            assert importlib.util.find_spec(words[2]), words
        elif words[0] == "helm":
            paths = [ROOT / word for word in words if word.startswith("helm/")]
            charts = [path for path in paths if path.suffix != ".yaml"]
            assert all((chart / "Chart.yaml").exists() for chart in charts), words
            assert all(path.exists() for path in paths), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_and_tables_exist(page):
    for words in inline_commands(page):
        command, name, rest = leaf(words)
        assert name, f"{page.name}: no command {words[0]!r}"
        unknown = {word.partition("=")[0] for word in rest if re.match("--[a-z]", word)}
        assert not unknown - options_of(command), f"{page.name}: {name} has no {unknown}"


def test_commands_that_need_no_server_run(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tiny"
    shutil.copytree(packaged_checkpoint(), folder)
    example = (
        (ROOT / "docs" / "policy.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    )
    (folder / "policy.yaml").write_text(example)
    monkeypatch.chdir(folder)
    ran = []
    for page in PAGES:
        for words in shell_lines(page):
            arguments = equipoise_words(words) or []
            _, name, rest = leaf(arguments)
            files = [file for option, file in pairwise(rest) if option in FILES]
            skipped = (
                ELLIPSIS & set(rest)
                or "--url" in rest
                or not all(map(Path.exists, map(Path, files)))
            )
            if name not in RUNS_ALONE or skipped:
                continue
            monkeypatch.setattr("sys.argv", ["equipoise", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0, (words, capsys.readouterr().err)
            ran.append(name)
    assert set(ran) >= {"plan", "replay", "whatif", "policy validate", "generate"}
