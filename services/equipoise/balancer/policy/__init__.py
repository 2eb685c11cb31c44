"""The policy in force for every pool, and the file that it is read from again and again."""
