"""How many files and connections a process may have open, which is set by the system."""

import resource

MOST_FILES = 65_536
"""Enough for a stream of each of 10,000 workers and 10,000 watchers, with room to spare."""

OTHER_FILES = 4096
"""Open files that clients leave to others; a server accepts half as many connections at once."""


def raise_open_files_limit() -> None:
    """Raise the soft limit, often 1,024, towards the hard limit, which needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_client_connections() -> int:
    """How many connections of clients a process may have beside its other files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(most // 2, most - OTHER_FILES)
