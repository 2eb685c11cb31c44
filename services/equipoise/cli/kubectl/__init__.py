"""`kubectl equipoise ...`: the same commands, connected to a release through kubectl."""
