"""Products of block-scaled FP8 rows and weights."""
