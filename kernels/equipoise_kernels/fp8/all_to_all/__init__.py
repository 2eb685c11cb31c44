"""Exchange of rows with the ranks that hold their experts: `buffer.EpBuffer`."""
