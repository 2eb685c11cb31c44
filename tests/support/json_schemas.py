"""Random JSON schemas and regexes whose values are finite and short."""

import string

LETTERS = string.ascii_lowercase


def random_schema(dice, depth=0):
    """A schema with what structured output is used for."""
    names = [*_LEAVES, *(2 * [*_NESTED] if depth < 2 else [])]
    name = dice.choice(["object", "array"] if depth == 0 else names)
    if name in _NESTED:
        return _NESTED[name](dice, depth)
    return _LEAVES[name](dice)


def _integer(dice):
    least = dice.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 90)}


def _string(dice):
    if dice.random() < 0.5:
        return {"type": "string", "pattern": f"^(?:{random_regex(dice)})$"}
    return {"type": "string", "minLength": 1, "maxLength": dice.randint(1, 8)}


def _array(dice, depth):
    least = dice.randint(0, 2)
    items = random_schema(dice, depth + 1)
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }


def _object(dice, depth):
    names = dice.sample(["a", "b", "name", "é", "with space"], dice.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(dice, depth + 1) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
        "additionalProperties": False,
    }


_LEAVES = {
    "integer": _integer,
    "number": lambda dice: {
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": dice.randint(1, 9),
    },
    "string": _string,
    "enum": lambda dice: {"enum": [dice.choice([1, 'a"b', None, True, "é"]) for _ in range(3)]},
    "const": lambda dice: {"const": dice.choice(["x", 7, [1, 2], {"a": None}])},
    "boolean": lambda _: {"type": "boolean"},
    "null": lambda _: {"type": "null"},
}
_NESTED = {
    "array": _array,
    "object": _object,
    "anyOf": lambda dice, depth: {"anyOf": [random_schema(dice, depth + 1) for _ in range(2)]},
}


def random_regex(dice, depth=0):
    """A regex that Python's re and llguidance's engine read alike."""
    parts = []
    for _ in range(dice.randint(1, 3)):
        kind = dice.choice(["letters", "class", "digits"] + (["group"] if depth < 2 else []))
        if kind == "letters":
            parts.append("".join(dice.choice(LETTERS) for _ in range(dice.randint(1, 4))))
        elif kind == "class":
            parts.append(f"[{dice.choice(LETTERS)}-z0]{{1,{dice.randint(1, 5)}}}")
        elif kind == "digits":
            parts.append("[0-9]" + dice.choice(["", "{2}", "?", "{0,3}"]))
        else:
            branches = "|".join(random_regex(dice, depth + 1) for _ in range(2))
            parts.append(f"(?:{branches})" + dice.choice(["", "?", "{1,2}"]))
    return "".join(parts)
