"""Files of loads and layouts, the peers' and our own: one format a file, in and out, lossless.

Here files are distrusted: whatever is in one, reading ends with a value or with `FormatError`, and
never executes what it reads. Nothing here plans, and nothing here needs torch.
"""
