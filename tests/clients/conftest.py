"""A fleet, and what installs and runs clients against it."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from equipoise.formats.packaged import packaged_checkpoint
from tests.support.serving_fleet import serving

FOLDER = os.environ.get("EQUIPOISE_CLIENTS", "")
"""Where clients are installed."""

HERE = Path(__file__).parent
INSTALL_S, RUN_S = 900, 240
TEMPLATE = """\
{% for message in messages %}{{ message.content or '' }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NEUTRAL = {"PYTHONPATH": "", "OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Files of the tiny model with a tokenizer, and with a template that shows tools."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copy(packaged_checkpoint() / "config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory, checkpoint):
    """Two workers and a gateway, whose template shows tools."""
    options = (f"--checkpoint={checkpoint}", "--model=tiny")
    folder = tmp_path_factory.mktemp("fleet")
    async with serving(folder, "--context-length=1024", gateway=options) as running:
        yield running


@pytest.fixture(scope="module")
def url(fleet):
    return str(fleet.client.base_url).rstrip("/")


@pytest.fixture
def run(url, tmp_path):
    """A function that runs a client's program, and returns its output."""

    async def run_client(client, *command):
        _install(client)
        python = Path(FOLDER) / client / "bin" / command[0]
        environment = {**os.environ, **OFFLINE, **NEUTRAL, "HOME": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            *(str(python.absolute()), *command[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env=environment,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), RUN_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        text = output.decode(errors="replace")
        assert process.returncode == 0, text[-6000:]
        return text

    return run_client


def _install(client):
    """Install a client once; a test is skipped if its packages cannot be had."""
    command = [HERE / "install.sh", FOLDER, client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{client} cannot be installed: {done.stderr.strip()[-300:]}")
