"""Who is on the other end of a gRPC port, what he may ask, and how we prove who we are.

Knows no room above it: it is told which services a port has and who may call them.
"""
