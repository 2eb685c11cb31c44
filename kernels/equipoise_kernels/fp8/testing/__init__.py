"""What tests and benchmarks of the kernels share; nothing that serves imports it."""
