"""The web page: read-only, served by the balancer, updated by server-sent events."""
