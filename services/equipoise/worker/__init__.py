"""The data plane's I/O: engine, reporter, stager, agent; the only package that sees both planes."""
