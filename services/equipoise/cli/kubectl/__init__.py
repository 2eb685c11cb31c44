"""`kubectl equipoise`: the same commands, which find a release's balancer by themselves."""
