"""`equipoise generate`: print the completion of a prompt as it is generated.

The model runs in this process, in a worker's engine without a balancer, or on a server.
"""

import secrets
import sys
from collections.abc import Generator
from contextlib import closing

from equipoise.cli.generate.settings import GenerateSettings
from equipoise.settings.errors import InvalidSettingsError


def run(settings: GenerateSettings) -> int:
    """Print the completion; return 0.

    Raises:
        InvalidSettingsError: the server is unreachable, or it or the model rejects the request.
        GatewayError, CheckpointError, WorkerError: the checkpoint cannot be used.
    """
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    if not prompt:
        raise InvalidSettingsError("the prompt is empty: standard input had no text")
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    with closing(_texts(settings, prompt, seed=seed)) as texts:
        for text in texts:
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _texts(settings: GenerateSettings, prompt: str, *, seed: int) -> Generator[str, None, None]:
    """Pieces of the completion. Only the local model imports torch."""
    if settings.url:
        from equipoise.cli.generate import remote

        return remote.texts(settings, prompt, seed=seed)
    from equipoise.cli.generate import local

    return local.texts(settings, prompt, seed=seed)
