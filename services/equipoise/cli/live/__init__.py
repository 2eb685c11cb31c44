"""`status`, `layout`, `decisions`, `epochs`, `loads`: looking at a fleet."""
