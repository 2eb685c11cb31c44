"""Metrics, Kubernetes Events and HTTP ports of the balancer."""
