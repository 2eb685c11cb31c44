"""`equipoise generate`: a model goes on with a text, here or at a server."""
