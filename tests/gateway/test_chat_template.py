"""The model's own template renders the prompt, inside a sandbox."""

import json
from datetime import datetime

import pytest

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.gateway.chat_template import ChatTemplate
from equipoise.gateway.errors import GatewayError, InvalidRequestError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>Hello</b>"},
]
# In the manner of DeepSeek-V3's.
TEMPLATE = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{% endif %}{% set ns = namespace(system='') %}{% for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""


@pytest.fixture
def template_of(tmp_path):
    """A function that reads the template of a tokenizer_config.json."""

    def read(**config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatTemplate.of_checkpoint(tmp_path)

    return read


def test_a_conversation_is_rendered_by_the_models_template(template_of):
    template = template_of(chat_template=TEMPLATE, bos_token={"content": "<begin>"})
    assert template.render(MESSAGES) == "<begin>Be brief.<|User|><b>Hello</b><|Assistant|>"


def test_the_template_named_default_is_used_among_several(template_of):
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert template_of(chat_template=named).render(MESSAGES) == "b"


def test_the_template_file_takes_precedence(template_of, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ eos_token }}")
    rendered = template_of(chat_template="other", eos_token="<end>").render(MESSAGES[1:])
    assert rendered == '[{"role": "user", "content": "<b>Hello</b>"}]<end>'


def test_the_tiny_model_continues_the_joined_messages():
    assert ChatTemplate.of_checkpoint(packaged_checkpoint()).render(MESSAGES) == (
        "Be brief.\n<b>Hello</b>"
    )


def test_a_checkpoint_without_a_template_has_none(template_of, tmp_path):
    assert ChatTemplate.of_checkpoint(tmp_path) is None
    assert template_of(bos_token="<begin>") is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.__init__.__globals__ }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_forbidden_operation_in_a_template_rejects_the_request(template_of, source):
    with pytest.raises(InvalidRequestError, match="the model's chat template rejects"):
        template_of(chat_template=source).render(MESSAGES)


@pytest.mark.parametrize("template", ["{% if %}", "{{", 5, [{"name": "default"}]])
def test_an_invalid_template_is_a_one_line_error(template_of, template):
    with pytest.raises(GatewayError):
        template_of(chat_template=template)


def test_templates_may_name_the_date_and_mark_generated_text(template_of):
    source = (
        "{{ strftime_now('%Y') }}{% for message in messages %}"
        "{% generation %}{{ message.content }}!{% endgeneration %}{% endfor %}"
    )
    rendered = template_of(chat_template=source).render(MESSAGES[:1])
    assert rendered == f"{datetime.now().astimezone().year}Be brief.!"


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "source",
    [
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools | tojson }}",
        "{%- if mine is defined %}{%- set tools = mine %}{%- endif %}{{ tools | tojson }}",
        "{% macro shown() %}{{ tools | tojson }}{% endmacro %}{{ shown() }}",
    ],
)
def test_tools_are_shown_by_any_template_that_reads_them(source):
    template = ChatTemplate(source, special={})
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, tools=TOOLS) == json.dumps(TOOLS)
    assert template.render(messages) == "null"


def test_a_template_that_reads_no_tools_is_named():
    template = ChatTemplate(
        "{% for tools in messages %}{{ tools.content }}{% endfor %}", special={}
    )
    with pytest.raises(InvalidRequestError, match="does not show tools"):
        template.render([{"role": "user", "content": "a"}], tools=TOOLS)
