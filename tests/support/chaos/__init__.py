"""Fault injection: a real fleet, seeded faults at random moments, and invariants to check.

`plan` makes runs from seeds (pure), `arena` is the fleet, `relay` the network between its parts,
`faults` does what a plan says, `checks` judges the history of a run (pure), `campaign` does many.
`python -m tests.support.chaos --help`, or `make chaos`.
"""
