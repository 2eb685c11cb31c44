"""The data plane's I/O: engine, reporter, applier, agent; the only room that sees both planes."""
