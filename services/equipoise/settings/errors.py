"""The error of every setting."""


class InvalidSettingsError(ValueError):
    """A setting, or what it names, cannot be used; the message names its value and the remedy."""
