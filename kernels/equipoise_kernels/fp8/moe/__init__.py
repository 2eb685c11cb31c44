"""Mixture of experts without its products: routing, ordering rows, weighted sums."""
