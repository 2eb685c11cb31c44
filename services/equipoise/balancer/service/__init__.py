"""The gRPC services of a balancer: WorkerLink, Status and Admin."""
