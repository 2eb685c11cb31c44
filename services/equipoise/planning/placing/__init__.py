"""Which expert is placed in which slot: the published greedy algorithm and improved ones."""
