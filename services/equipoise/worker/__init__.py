"""The data plane's I/O: engine, reporter, stager, agent; the only room that sees both planes."""
