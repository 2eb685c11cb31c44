"""Regenerates the committed stubs from the .proto files; `make protos` runs it.

The stubs are committed so that running the product needs no compiler, and `check.py` keeps
them honest. The plugins are those of the environment that runs this script.
"""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parent

_COMPILER = "grpcio-tools==1.76.0"
"""In an environment of its own, because it needs protobuf 6. Stubs run with the protobuf (6.31) and
gRPC of their compiler and with later ones, and many releases of vLLM and SGLang rule out protobuf
7."""

_PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


class GenerationError(RuntimeError):
    """The compiler rejected a .proto file or is not installed; the message says which."""


def main() -> int:
    """Write the stubs beside their .proto files; returns the exit status."""
    try:
        generate(PROTOS, into=PROTOS)
    except GenerationError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"regenerated {len(stubs(PROTOS))} stubs from {len(sources(PROTOS))} .proto files")
    return 0


def sources(root: Path) -> list[Path]:
    """Every .proto file below `root`, sorted."""
    return sorted(root.rglob("*.proto"))


def stubs(root: Path) -> list[Path]:
    """Every generated file below `root`, sorted."""
    return sorted([*root.rglob("*_pb2*.py"), *root.rglob("*_pb2*.pyi")])


def generate(root: Path, *, into: Path) -> None:
    """Write the stubs of every .proto file below `root` to the same places below `into`.

    Raises:
        GenerationError: what the compiler printed, or what to install.
    """
    programs = Path(sys.executable).parent
    missing = [name for name in ("uv", *_PLUGINS) if not (programs / name).exists()]
    if missing:
        raise GenerationError(f"{', '.join(missing)} not found: run `make setup`")
    done = subprocess.run(
        [
            *(str(programs / "uv"), "run", "--quiet", "--isolated", "--no-project"),
            *("--python", sys.executable, "--with", _COMPILER),
            *("python", "-m", "grpc_tools.protoc", f"--proto_path={root}"),
            *(f"--plugin={name}={programs / name}" for name in _PLUGINS),
            *(f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
            *(str(path.relative_to(root)) for path in sources(root)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GenerationError(f"protoc failed:\n{done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
