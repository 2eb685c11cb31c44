"""The entry point of `equipoise`: Ctrl-C during imports ends in one line, too."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line and run it."""
    try:
        from equipoise.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("equipoise: interrupted", file=sys.stderr)
        sys.exit(130)
