"""`raise_open_files_limit`: as many open files and connections as the system allows."""

import resource

MOST_FILES = 65_536
"""Enough for a stream of each of 10,000 workers and 10,000 watchers, with room to spare."""


def raise_open_files_limit() -> None:
    """Raise the soft limit, often 1,024, towards the hard limit, which needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
