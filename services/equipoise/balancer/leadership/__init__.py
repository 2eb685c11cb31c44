"""Leader election: a state machine, and the registers that store the lease."""
