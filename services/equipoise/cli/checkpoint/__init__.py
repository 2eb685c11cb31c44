"""`equipoise checkpoint …`: what can be done with a model's weights before they are served."""
