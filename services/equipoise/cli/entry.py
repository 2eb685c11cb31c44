"""What the `equipoise` program runs first, so that Ctrl-C while it imports ends in one line too."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line and run it."""
    try:
        from equipoise.cli.main import main as run  # noqa: PLC0415 - what takes time is this

        run()
    except KeyboardInterrupt:
        print("equipoise: interrupted", file=sys.stderr)
        sys.exit(130)
