"""Which expert lies in which slot: the published greedy and everything that is better than it."""
