"""What people type: `equipoise balancer`, `worker`, `status`, `demo`. Owns no state."""
