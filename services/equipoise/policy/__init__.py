"""The policy file: its form, its faults, its digest, and the policy in force for each pool.

Must not decide or store anything, and must not watch files.
"""
