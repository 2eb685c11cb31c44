"""Lossless readers and writers for load and layout files of Equipoise and other engines.

Files are untrusted: reading returns a value or raises `FormatError`, and never executes content.
Nothing here needs torch.
"""
