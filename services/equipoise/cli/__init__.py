"""The `equipoise` command line."""
