"""Commands that talk to a running balancer."""
