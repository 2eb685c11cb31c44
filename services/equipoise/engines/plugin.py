"""The entry points that vLLM and SGLang load in every process; they import only what is wanted."""

import importlib
import logging
import os

_VARIABLES = ("EQUIPOISE_BALANCER", "EQUIPOISE_POOL")

_log = logging.getLogger(__name__)


def vllm() -> None:
    """Balance this vLLM, if the environment names a balancer."""
    _register("equipoise.engines.vllm")


def sglang() -> None:
    """Balance this SGLang, if the environment names a balancer."""
    _register("equipoise.engines.sglang")


def _register(name: str) -> None:
    if not any(os.environ.get(variable) for variable in _VARIABLES):
        return
    try:
        importlib.import_module(name).register()
    except Exception:  # noqa: BLE001 - see below
        # The engine must start, whatever is wrong with the plugin's packages.
        _log.exception("Equipoise leaves this engine alone: its plugin failed to start")
