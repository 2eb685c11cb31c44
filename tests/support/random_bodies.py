"""Random request bodies for the gateway, from a seed: fields, types and bytes as no client means.

Most are close to valid ones, because what is far from them is rejected at once.
"""

import json
import random

from equipoise.gateway import openai_requests as requests

_MESSAGES = [{"role": "user", "content": "def f("}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}

VALID = {
    "/v1/completions": [
        {"prompt": "def f(", "max_tokens": 2},
        {"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "stream": True, "logprobs": 1},
        {"prompt": [[1, 2], [3]], "max_tokens": 1, "echo": True, "logprobs": 0},
        {"prompt": "a", "max_tokens": 3, "guided_regex": "[a-c]{1,3}", "temperature": 0.5},
    ],
    "/v1/chat/completions": [
        {"messages": _MESSAGES, "max_tokens": 2, "stream": True},
        {"messages": _MESSAGES, "max_tokens": 2, "top_logprobs": 2, "logprobs": True},
        {"messages": _MESSAGES, "max_tokens": 9, "tools": _TOOLS, "tool_choice": "required"},
        {
            "messages": _MESSAGES,
            "max_tokens": 9,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA},
            },
        },
    ],
    "/v1/responses": [
        {"input": "def f(", "max_output_tokens": 2, "stream": True},
        {"input": _MESSAGES, "max_output_tokens": 2, "instructions": "be brief"},
    ],
    "/tokenize": [{"prompt": "a b"}, {"messages": _MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}

_NAMES = sorted(
    requests._OF_COMPLETIONS
    | requests._OF_CHATS
    | requests._OF_RESPONSES
    | {*requests._COMPLETIONS_UNSUPPORTED, *requests._CHATS_UNSUPPORTED}
    | {*requests._RESPONSES_UNSUPPORTED}
    | {"", "a", "\ud800", "role", "content", "type", "function", "schema"}
)
_NUMBERS = (
    *(0, -0.0, 1, -1, 2, 0.5, 1e-300, 5e-324, 1e39, -1e308, 7, 64, 65, 2**31, 2**32, 2**63),
    *(-(2**63), 2**64, 10**400, float("nan"), float("inf"), float("-inf")),
)
_STRINGS = (
    *("", "a", "1", "auto", "none", "required", "json_object", "\x00", "\ud800", "é", "🜁", "</s>"),
    *("def f(", "[a-z]{1,9}", "(", "start: /a+/", "{{ x }}", " " * 70, "data: [DONE]\n\n"),
)
_USUAL = {
    "temperature": (0, 0.7, 2),
    "top_p": (0.1, 1),
    "top_k": (-1, 0, 1, 40),
    "min_p": (0, 0.5),
    "n": (1, 3, 16),
    "seed": (0, 2**64 - 1),
    "stop": ("a", [" ", "def"]),
    "stream": (True, False),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (2, -0.5),
    "repetition_penalty": (0.01, 1.1, 100),
    "logit_bias": ({"97": 100}, {"5": -100, "6": 0.5}),
    "min_tokens": (0, 1),
    "max_tokens": (1, 5),
    "ignore_eos": (True,),
    "return_token_ids": (True,),
    "prompt_logprobs": (0, 20),
    "skip_special_tokens": (True, False),
}
"""Values that most requests may have."""
_MAX_DEPTH = 4


def random_body(dice: random.Random) -> tuple[str, bytes]:
    """A path and a body for it."""
    path = dice.choice([*VALID])
    body = json.loads(json.dumps(dice.choice(VALID[path])))
    for name in dice.sample([*_USUAL], dice.randrange(4)):
        body[name] = dice.choice(_USUAL[name])
    for _ in range(dice.choice((0, 0, 1, 1, 2))):
        _change(dice, body)
    data = json.dumps(_value(dice) if dice.random() < 0.05 else body).encode()
    return path, _damaged(dice, data) if dice.random() < 0.1 else data


def _value(dice, depth=0):
    kind = dice.randrange(9 if depth < _MAX_DEPTH else 6)
    if kind < 2:
        return dice.choice(_NUMBERS)
    if kind < 4:
        return dice.choice(_STRINGS)
    if kind < 6:
        return dice.choice((None, True, False))
    values = [_value(dice, depth + 1) for _ in range(dice.choice((0, 1, 2, 5)))]
    return values if kind < 7 else {dice.choice(_NAMES): value for value in values}


def _change(dice, body):
    """Change one value of a body, at the top or deeper down."""
    place = body
    while dice.random() < 0.5:
        inner = [value for value in _values(place) if isinstance(value, dict | list) and value]
        if not inner:
            break
        place = dice.choice(inner)
    if isinstance(place, list):
        place[dice.randrange(len(place))] = _value(dice, 1)
    elif place and dice.random() < 0.15:
        del place[dice.choice([*place])]
    else:
        names = [*place] if place and dice.random() < 0.3 else _NAMES
        place[dice.choice(names)] = _value(dice, 1)


def _values(place):
    return place.values() if isinstance(place, dict) else place


def _damaged(dice, data):
    """Some bytes lost, repeated or exchanged."""
    begin = dice.randrange(len(data))
    end = min(len(data), begin + dice.choice((1, 1, 2, 9, 999)))
    other = dice.choice((b"", dice.randbytes(end - begin), 2 * data[begin:end], b'"', b"}", b"["))
    return data[:begin] + other + data[end:]
