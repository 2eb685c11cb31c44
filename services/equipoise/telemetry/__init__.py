"""How a process shows itself to machines: metrics over HTTP, and logs that programs can read.

Knows no room above it; what there is to show is handed in.
"""
