"""`equipoise bench serve`: how fast a server answers, from outside."""
