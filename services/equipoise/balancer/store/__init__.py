"""What must not be forgotten, in an SQLite file or in Redis, under one promise."""
