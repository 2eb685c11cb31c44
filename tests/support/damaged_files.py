"""Damage to checkpoints as disks and copies do it: one bit, without a word."""

import json

HEADER = 8


def place_of(path, name):
    """The file of a folder that holds a tensor, and the tensor's first and last byte in it."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER), "little")
            header = json.loads(stream.read(length))
        if name in header:
            first, end = header[name]["data_offsets"]
            return file, HEADER + length + first, HEADER + length + end
    raise AssertionError(f"no file of {path} has {name}")


def flip_bit(path, name, *, bit=1):
    """Flip one bit in the middle of a tensor; returns the file."""
    file, first, end = place_of(path, name)
    with file.open("r+b") as stream:
        stream.seek((first + end) // 2)
        byte = stream.read(1)[0]
        stream.seek((first + end) // 2)
        stream.write(bytes([byte ^ bit]))
    return file
