"""`equipoise demo`: a fleet on one machine that drifts out of balance and recovers."""
