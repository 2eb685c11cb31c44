"""Rows to the ranks that hold their experts, and back: `buffer.EpBuffer`."""
