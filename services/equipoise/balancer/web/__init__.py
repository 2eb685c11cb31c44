"""The page for people: read-only, served by the balancer itself, live by server-sent events.

Owns what a browser gets. Must not change anything, nor fetch anything from elsewhere.
"""
