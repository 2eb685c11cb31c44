"""A DeepSeek-V3-style model whose layout decides which slot holds which routed expert."""
