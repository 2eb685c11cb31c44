"""Checks the contract; `make lint` runs it: stubs fit their .proto files, style, compatibility.

`baseline.binpb` is the contract of the last release. A change that would break a deployed peer is
rejected. At a release the new contract becomes the baseline:
`buf build protos --exclude-source-info -o protos/baseline.binpb`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from generate import PROTOS, GenerationError, generate, sources, stubs

BASELINE = "baseline.binpb"


def main() -> int:
    """Run every check and print each fault with its remedy; returns the exit status."""
    faults = [*stale_stubs(PROTOS), *style_faults(PROTOS), *breaking_changes(PROTOS)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"the contract is sound: {len(sources(PROTOS))} .proto files, stubs as generated")
    return 1 if faults else 0


def stale_stubs(root: Path) -> list[str]:
    """Committed stubs that differ from what their .proto files generate."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        try:
            generate(root, into=fresh)
        except GenerationError as error:
            return [str(error)]
        wanted = {path.relative_to(fresh): path.read_bytes() for path in stubs(fresh)}
    found = {path.relative_to(root): path.read_bytes() for path in stubs(root)}
    return [
        f"{path}: {_difference(path, wanted, found)}: run `make protos` and commit the result"
        for path in sorted(wanted.keys() | found.keys())
        if wanted.get(path) != found.get(path)
    ]


def style_faults(root: Path) -> list[str]:
    """What `buf lint` finds, by the rules of buf.yaml."""
    return [f"{line} (protos/buf.yaml has the rules)" for line in _buf(root, "lint")]


def breaking_changes(root: Path) -> list[str]:
    """Changes that a peer of the last release would not understand."""
    return [
        f"{line} Deployed peers would break: add a field instead, and reserve what is removed"
        for line in _buf(root, "breaking", "--against", BASELINE)
    ]


def _difference(path: Path, wanted: dict[Path, bytes], found: dict[Path, bytes]) -> str:
    if path not in found:
        return "the stub is missing"
    if path not in wanted:
        return "no .proto file generates this stub"
    return "the stub differs from its .proto file"


def _buf(root: Path, *arguments: str) -> list[str]:
    buf = Path(sys.executable).parent / "buf"
    if not buf.exists():
        return [f"buf {arguments[0]}: buf is not installed: run `make setup`"]
    done = subprocess.run(
        [str(buf), *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return []
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    return lines or [f"buf {arguments[0]} ended with exit status {done.returncode}"]


if __name__ == "__main__":
    sys.exit(main())
