"""`equipoise generate`: print the completion of a prompt as it is generated.

The model runs in this process, in a worker's engine without a balancer, or on a server.
"""

import secrets
import sys
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
    if settings.url:
        from equipoise.cli.generate.remote import texts
    else:
        from equipoise.cli.generate.local import texts  # Imports torch.
    with closing(texts(settings, prompt, seed=seed)) as pieces:
        for text in pieces:
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
