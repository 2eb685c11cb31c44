"""Equipoise inside other engines: vLLM and SGLang. Read `seat.py` first.

They load `plugin.py` in every process. Without EQUIPOISE_BALANCER and EQUIPOISE_POOL in the
environment, it imports and changes nothing.
"""
