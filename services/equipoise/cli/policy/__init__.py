"""`equipoise policy`: policy files checked, shown, compared, and tried on current loads."""
