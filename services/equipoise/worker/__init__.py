"""The data plane's I/O: our engine around `equipoise.rank`. Only these two see both planes."""
