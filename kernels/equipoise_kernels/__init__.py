"""The model's operations, one a file: contract and torch reference."""
