"""`equipoise bench serve`: latency and throughput of a server."""
