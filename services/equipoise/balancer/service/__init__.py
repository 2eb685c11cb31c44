"""What the balancer answers over gRPC: workers, whoever looks, and operators."""
