"""`equipoise checkpoint ...`: prepare a model's weights."""
