"""A DeepSeek-V3-style model whose routed experts lie where a layout says."""
