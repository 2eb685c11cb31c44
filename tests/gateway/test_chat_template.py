"""The model's own template makes the prompt; what it must not do it cannot."""

import json

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


def test_a_conversation_is_written_as_the_model_was_taught(template_of):
    template = template_of(chat_template=TEMPLATE, bos_token={"content": "<begin>"})
    assert template.render(MESSAGES) == "<begin>Be brief.<|User|><b>Hello</b><|Assistant|>"


def test_of_several_templates_the_default_is_taken(template_of):
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert template_of(chat_template=named).render(MESSAGES) == "b"


def test_a_file_of_its_own_goes_first(template_of, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ eos_token }}")
    rendered = template_of(chat_template="other", eos_token="<end>").render(MESSAGES[1:])
    assert rendered == '[{"role": "user", "content": "<b>Hello</b>"}]<end>'


def test_the_tiny_model_goes_on_with_what_was_said():
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
def test_what_a_template_may_not_do_is_a_refusal(template_of, source):
    with pytest.raises(InvalidRequestError, match="the model's chat template refuses"):
        template_of(chat_template=source).render(MESSAGES)


@pytest.mark.parametrize("template", ["{% if %}", "{{", 5, [{"name": "default"}]])
def test_a_template_that_cannot_be_read_is_one_line(template_of, template):
    with pytest.raises(GatewayError):
        template_of(chat_template=template)
