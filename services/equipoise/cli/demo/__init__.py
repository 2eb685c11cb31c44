"""`equipoise demo`: the whole story on one machine, and its figures."""
