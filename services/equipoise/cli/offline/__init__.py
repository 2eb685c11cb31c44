"""`plan`, `replay`, `whatif`, `convert`: planning on recorded loads, without a fleet."""
