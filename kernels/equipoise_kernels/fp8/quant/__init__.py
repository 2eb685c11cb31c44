"""Quantisation to FP8 and back: per operation a contract, torch twin, kernel and launcher."""
