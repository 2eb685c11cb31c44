"""Two scripted ranks with a gateway in front of them."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import pytest
import pytest_asyncio

from equipoise.gateway.server import serve
from equipoise.gateway.settings import GatewaySettings
from tests.support.scripted_ranks import (
    BOUND_S,
    END_TOKEN,
    TRUSTING_NOBODY,
    VOCAB_SIZE,
    FakeRank,
    Fleet,
    Gateway,
    listening,
)

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.content == 'forbidden' %}{{ raise_exception('this is not said here') }}{% endif %}
[{{ message.role }}]{{ (message.content or '') | replace('changed', 'other') }}
{%- for call in message.tool_calls or [] %}
({{ call.function.name }}{{ call.function.arguments | tojson }}{{ ':' + call.function.arguments }})
{%- endfor %}
{%- endfor %}
{%- if mood %}({{ mood }}){% endif %}
{%- if add_generation_prompt is defined and not add_generation_prompt %}.{% endif %}
"""


@pytest_asyncio.fixture
async def fleet():
    """Two ranks that listen."""
    ranks = [FakeRank(), FakeRank()]
    async with listening(ranks[0]) as first, listening(ranks[1]) as second:
        yield Fleet(ranks, [first, second])


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with all that a gateway reads of a model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"vocab_size": VOCAB_SIZE, "eos_token_id": END_TOKEN}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run_gateway(checkpoint):
    """A function that serves with these settings, as an async context manager."""

    @asynccontextmanager
    async def run(**settings):
        stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(
                GatewaySettings(listen="127.0.0.1:0", checkpoint=checkpoint, **settings),
                stop=stop,
                listening=address.set_result,
            )
        )
        try:
            base_url = f"http://{await asyncio.wait_for(address, BOUND_S)}"
            async with httpx2.AsyncClient(
                base_url=base_url, timeout=BOUND_S, verify=TRUSTING_NOBODY
            ) as client:
                yield Gateway(client, stop, task)
        finally:
            stop.set()
            await asyncio.wait_for(task, BOUND_S)

    return run


@pytest_asyncio.fixture
async def gateway(run_gateway, fleet):
    """A gateway in front of the two ranks, which need not report their context length first."""
    async with run_gateway(workers=tuple(fleet.addresses), context_length=256) as running:
        yield running
