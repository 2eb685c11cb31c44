"""The error of every setting."""


class InvalidSettingsError(ValueError):
    """A setting is invalid; the message names the setting, its value and the valid values."""
