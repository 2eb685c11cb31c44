"""`log_by`: the plugin's lines appear in the engine's log, and say whose they are."""

import copy
import logging

LOADED = "the plugin is loaded for pool %s; it begins after the first forward pass with EPLB on: %s"
"""For the pool and the engine's options: an engine without EPLB never calls the plugin."""

_NAME = "Equipoise"


class _ByEngine(logging.Handler):
    """Passes lines to an engine's logger, whatever its configuration is by then."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        """Have the engine log a line, if its level is high enough."""
        if not self._engine.isEnabledFor(record.levelno):
            return
        line, text = copy.copy(record), record.getMessage()
        line.msg, line.args = text if text.startswith(_NAME) else f"{_NAME}: {text}", ()
        self._engine.handle(line)


def log_by(engine: str) -> None:
    """Log by the engine's logger of this name; that of the root is empty.

    vLLM sets up its own logger only, so that lines of others would appear nowhere. Neither engine
    shows the logger that a line comes from.
    """
    logger = logging.getLogger("equipoise")
    if not logger.handlers:
        logger.addHandler(_ByEngine(logging.getLogger(engine)))
        logger.setLevel(logging.INFO)
        logger.propagate = False
