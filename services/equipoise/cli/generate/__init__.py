"""`equipoise generate`: complete a prompt, in this process or on a server."""
