"""Into FP8 and back: each operation with its contract, torch twin, kernel and launcher."""
