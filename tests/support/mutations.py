"""Broken versions of valid protobuf messages: by structure, which stay readable, and by bytes."""

import random as random_module

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from equipoise.wire.seal import seal
from equipoise_api.v1.worker_link_pb2 import ConnectRequest
from tests.support.limits import FLOATS, RANGES, TEXTS, WIDE

EDGES = (2, 7, 255, *WIDE)
_TEXTS = ("a" * 300, "ä" * 2000, "host:0", *TEXTS.values())


class Mutator:
    """Mutations by a seed, so that a fault found once is found again."""

    def __init__(self, seed: int) -> None:
        self._random = random_module.Random(seed)

    def mutated(self, message: Message) -> Message | None:
        """A broken copy; None if its bytes can no longer be read."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            self._change(copy)
        if self._random.random() >= 0.7:
            try:
                copy = type(message).FromString(self.damaged(copy.SerializeToString()))
            except DecodeError:
                return None
        # A sender that lies computes the digest of its lie.
        return seal(copy) if isinstance(copy, ConnectRequest) else copy

    def damaged(self, original: bytes) -> bytes:
        """A few bytes changed, cut out, doubled or put in."""
        random, data = self._random, bytearray(original)
        for _ in range(random.randint(1, 4)):
            at = random.randint(0, len(data))
            match random.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << random.randrange(8)
                case 1:
                    del data[at : at + random.randint(1, 9)]
                case 2:
                    data[at:at] = random.randbytes(random.randint(1, 12))
                case _:
                    start = random.randint(0, len(data))
                    data[at:at] = data[start : start + random.randint(1, 40)]
        return bytes(data)

    def _change(self, message: Message) -> None:
        """Change one field of the message, or of one inside it."""
        field = self._random.choice(message.DESCRIPTOR.fields)
        present = [one for one, _ in message.ListFields()]
        if present and self._random.random() < 0.8:
            field = self._random.choice(present)
        if self._random.random() < 0.05:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._change_repeated(message, field)
        elif field.message_type is not None:
            self._change(getattr(message, field.name))
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _change_repeated(self, message: Message, field: FieldDescriptor) -> None:
        items = getattr(message, field.name)
        kind = self._random.randrange(4)
        if items and kind == 0:
            del items[self._random.randrange(len(items))]
        elif field.message_type is None:
            items.append(self._value(field, field.default_value or None))
        elif items and kind == 1:
            items.add().CopyFrom(items[self._random.randrange(len(items))])
        elif items and kind == 2:
            self._change(items[self._random.randrange(len(items))])
        else:
            self._change(items.add())

    def _value(self, field: FieldDescriptor, now: object) -> object:
        random = self._random
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return not now
            case FieldDescriptor.CPPTYPE_ENUM:
                return random.choice((0, 1, 2, 3, 4, 99, -1))
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return random.choice(FLOATS)
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self._bytes(bytes(now or b""))
            case FieldDescriptor.CPPTYPE_STRING:
                return random.choice(_TEXTS)
            case kind:
                low, high = RANGES[kind]
                near = int(now or 0) + random.choice((-2, -1, 1, 2, 3))
                value = near if random.random() < 0.5 else random.choice(EDGES)
                return min(max(value, low), high)

    def _bytes(self, now: bytes) -> bytes:
        """Of another length, or of the same length and other contents."""
        random = self._random
        if random.random() < 0.3 or not now:
            kept = now[: random.randint(0, len(now))]
            return kept + random.randbytes(random.choice((0, 0, 4, 8)))
        data = bytearray(now)
        for _ in range(random.choice((1, 1, 2, 8))):
            at = random.randrange(len(data))
            data[at] = random.choice((0, 1, 2, 0x7F, 0x80, 0xFF, data[at] ^ 4))
        return bytes(data)
