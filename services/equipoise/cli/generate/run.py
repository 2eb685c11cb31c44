"""`equipoise generate`: a model goes on with a text, and the shell shows it as it is made.

The model runs in this process, by a worker's engine without a balancer, or behind a URL.
"""

import importlib
import secrets
import sys
from collections.abc import Generator
from contextlib import closing

from equipoise.cli.generate.settings import GenerateSettings
from equipoise.cli.offline.settings import ToolInputError


def run(settings: GenerateSettings) -> int:
    """Print the text behind the prompt; returns the exit status 0.

    Raises:
        ToolInputError: the server or the model refuses what is asked, or cannot be reached.
        GatewayError, CheckpointError, WorkerError: the checkpoint is of no use.
    """
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    if not prompt:
        raise ToolInputError("the prompt is empty: nothing came from standard input")
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    with closing(_texts(settings, prompt, seed=seed)) as texts:
        for text in texts:
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _texts(settings: GenerateSettings, prompt: str, *, seed: int) -> Generator[str, None, None]:
    """Either way imports what the other does not need."""
    where = "equipoise.cli.generate.remote" if settings.url else "equipoise.cli.generate.local"
    texts: Generator[str, None, None] = importlib.import_module(where).texts(
        settings, prompt, seed=seed
    )
    return texts
