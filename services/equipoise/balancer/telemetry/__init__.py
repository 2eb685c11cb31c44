"""What the balancer tells without being asked: metrics, Kubernetes Events, pages over HTTP."""
