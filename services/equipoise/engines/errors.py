"""Why a plugin leaves its engine alone."""


class UnsupportedEngineError(Exception):
    """This engine cannot be balanced as it is started; the message names the remedy."""
