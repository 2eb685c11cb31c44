"""`grammar_of`: what a request's output must match, in OpenAI's form and in vLLM's two."""

import json
from typing import Any

from equipoise.gateway.errors import InvalidRequestError
from equipoise.gateway.fields import Fields, shown
from equipoise.wire.inference_messages import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

GRAMMAR_FIELDS = frozenset(
    {
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""The fields that `grammar_of` reads."""

MAX_CHOICES = 1024
"""Strings of a choice."""

_ANY_OBJECT = '{"type": "object"}'


def grammar_of(fields: Fields) -> Grammar | None:
    """The one grammar of a request; None if its output is free.

    Raises:
        InvalidRequestError: a field is invalid, or there are several grammars.
    """
    found = {
        name: grammar
        for name in sorted(GRAMMAR_FIELDS)
        if name in fields and (grammar := _READ[name](fields, name)) is not None
    }
    if len(found) > 1:
        first, second, *_ = found
        raise fields.reject(second, f"and {first} both say what the output must match: send one")
    return next(iter(found.values()), None)


def _response_format(fields: Fields, name: str) -> Grammar | None:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise fields.reject(name, "must be an object")
    options = Fields(value, path=f"{name}.")
    if options.get("type") == "json_schema":
        options.only({"type", "json_schema"})
        named = options.get("json_schema")
        if not isinstance(named, dict):
            raise options.reject("json_schema", "must be an object with a schema")
        inner = Fields(named, path=f"{name}.json_schema.")
        inner.only({"name", "description", "schema", "strict"})
        return json_schema_of(inner, "schema")
    return shape_of(options)


def shape_of(options: Fields) -> Grammar | None:
    """What a response format without a schema means.

    Raises:
        InvalidRequestError: its `type` is not known.
    """
    options.only({"type"})
    kind = options.get("type")
    if kind == "json_object":
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=_ANY_OBJECT)
    if kind != "text":
        raise options.reject("type", f"must be text, json_object or json_schema, not {shown(kind)}")
    return None


def _structured_outputs(fields: Fields, name: str) -> Grammar | None:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise fields.reject(name, "must be an object")
    options = Fields(value, path=f"{name}.")
    options.only({*_READ_OPTION, "json_object"})
    grammars = [read(options, key) for key, read in _READ_OPTION.items() if key in options]
    if options.flag("json_object"):
        grammars.append(Grammar(kind=GrammarKind.JSON_SCHEMA, text=_ANY_OBJECT))
    if len(grammars) != 1:
        raise fields.reject(name, "must have one of json, regex, choice, grammar, json_object")
    return grammars[0]


def json_schema_of(fields: Fields, name: str) -> Grammar:
    """A schema, as an object or as JSON text.

    Raises:
        InvalidRequestError: it is not a schema.
    """
    value = text = fields.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise fields.reject(name, "is not valid JSON") from None
    else:
        text = json.dumps(value)
    if not isinstance(value, dict):
        raise fields.reject(name, "must be a JSON schema")
    return _grammar(fields, name, GrammarKind.JSON_SCHEMA, text)


def _regex(fields: Fields, name: str) -> Grammar:
    return _grammar(fields, name, GrammarKind.REGEX, fields.get(name))


def _lark(fields: Fields, name: str) -> Grammar:
    return _grammar(fields, name, GrammarKind.GRAMMAR, fields.get(name))


def _choice(fields: Fields, name: str) -> Grammar:
    value = fields.get(name)
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(one, str) and one for one in value):
        raise fields.reject(name, f"must be a list of 1 to {MAX_CHOICES} strings, not empty")
    return _grammar(fields, name, GrammarKind.REGEX, "|".join(map(_literal, value)))


def _grammar(fields: Fields, name: str, kind: GrammarKind, text: Any) -> Grammar:
    if not isinstance(text, str) or not text:
        raise fields.reject(name, "must be a string, not empty")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise fields.reject(name, "contains an unpaired surrogate") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise fields.reject(name, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(kind=kind, text=text)


def _literal(text: str) -> str:
    """A regular expression that matches a text alone."""
    return "".join(
        letter if letter.isalnum() or not letter.isascii() else f"\\x{ord(letter):02x}"
        for letter in text
    )


_READ_OPTION = {"json": json_schema_of, "regex": _regex, "choice": _choice, "grammar": _lark}
_READ = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{name}": read for name, read in _READ_OPTION.items()},
}


def check_end(fields: Fields, *, has_end: bool, min_tokens: int) -> None:
    """Check that an output with a grammar can end where the grammar ends.

    Raises:
        InvalidRequestError: other fields, or the model, prevent it.
    """
    if fields.flag("ignore_eos"):
        raise fields.reject("ignore_eos", "must be false if the output must match a grammar")
    if min_tokens:
        raise fields.reject("min_tokens", "must be 0 if the output must match a grammar")
    if not has_end:
        raise InvalidRequestError("the model has no end token, which structured output needs")
