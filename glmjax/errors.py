"""Errors that a user can act on.  The command line prints them on one line and exits with 2; HTTP answers 400."""


class GlmjaxError(Exception):
    """Base of every error that glmjax raises for something outside its own code."""


class ConfigError(GlmjaxError, ValueError):
    """A configuration value is missing, unknown or cannot work; the message names key and value."""


class CheckpointError(GlmjaxError):
    """A checkpoint cannot be read: the message names the file and the tensor."""


class RequestError(GlmjaxError, ValueError):
    """A request cannot be served as asked.

    Attributes:
      param: the offending field as the user knows it, e.g. ``"temperature"``; None if no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param
