"""The clients' side: an OpenAI-compatible HTTP API in front of a pool's ranks.

Owns requests from the first byte to the last token, even if ranks fail. Independent of
the model: tokens are numbers here. Start with `relay.py`, the life of one request.
"""
