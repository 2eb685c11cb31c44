"""`equipoise policy ...`: check, show, compare and preview policy files."""
