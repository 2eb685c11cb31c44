"""`equipoise overlap`: how much communication hides under computation in a profiler trace."""
