"""Which of several balancers leads: a table of roles, and the registers that a lease lives in."""
