"""What all settings share: their ranges, their error, their explanations, and host:port."""
