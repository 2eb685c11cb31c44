"""The policy that people write: a `BalancePolicy` file, read, checked and turned into `Policy`.

Owns the file's form and what is said about its faults. Must not decide, watch or store anything.
"""
