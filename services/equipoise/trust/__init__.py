"""Authentication and authorisation of gRPC ports: certificates, tokens and roles.

Must not know what the calls do.
"""
