"""The errors that a user can meet: one or two sentences that name field or file, value, requirement and remedy."""


class UserError(Exception):
    """What a user can correct or should know; the message says all."""

    is_said = False  # another rank prints the same message


class ConfigError(UserError, ValueError):
    """A setting that cannot be used; the message names field, value, requirement and remedy."""


class DatasetError(UserError, ValueError):
    """A dataset that cannot be used as it is; the message says what to do."""


class RunError(UserError, RuntimeError):
    """Nothing to change in the command or config, and the message says all: exit status 1, without a traceback."""
