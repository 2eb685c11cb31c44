"""The clients' side: HTTP in OpenAI's form in front of a pool's ranks.

Owns requests from the first byte to the last token, whatever happens to the ranks meanwhile. Must
not know the model: tokens are numbers here. Read `relay.py` first: it is one request's life.
"""
