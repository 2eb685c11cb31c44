"""Plans and their verdicts, made off the event loop in separate processes."""
