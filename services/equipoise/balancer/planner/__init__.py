"""Plans and their verdicts, away from the event loop: in threads, or in processes of their own."""
