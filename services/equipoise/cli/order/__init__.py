"""`rebalance`, `pause`, `rollback`, `pin` and the others: what operators order."""
