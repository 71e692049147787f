"""The errors that users see: one or two sentences that name the field or file, the value, the requirement and the
remedy."""


class UserError(Exception):
    """An error that the user can correct or should know of; the message is self-contained."""

    is_said = False  # another rank prints the same message


class ConfigError(UserError, ValueError):
    """A setting that cannot be used; the message names field, value, requirement and remedy."""


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used as it is; the message gives the remedy."""


class RunError(UserError, RuntimeError):
    """A failure that is not due to the command or config: exit status 1, and a message without a traceback."""
