"""One pool's life: who is in it, what it carries, what is planned, rolled out, ordered, undone."""
