"""The errors that a user can meet: one or two sentences that name field or file, value, requirement and remedy."""


class ConfigError(ValueError):
    """A setting that cannot be used; the message names field, value, requirement and remedy."""


class DatasetError(ValueError):
    """A dataset that cannot be used as it is; the message says what to do."""


class RunError(RuntimeError):
    """Nothing to change in the command or config, and the message says all: exit status 1, without a traceback."""
