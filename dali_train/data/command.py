"""How the tools end: an error is one line for people, and the exit status says of which kind it is."""

import sys
from collections.abc import Callable

from dali_train.data.convert.archive import SourceError
from dali_train.data.convert.download import DownloadError
from dali_train.data.convert.image import RecipeError
from dali_train.data.convert.run import ConversionError, ConversionFailedError
from dali_train.data.manifest import DatasetError
from dali_train.data.tfrecord import TFRecordError

_MISTAKES = (ConversionError, RecipeError, SourceError, DatasetError)  # in the command, or in what it is given
_FAILURES = (ConversionFailedError, DownloadError, TFRecordError, OSError)
STOPPED = 130  # as of a shell's command that Ctrl-C ended


def run_tool(name: str, work: Callable[[], int]) -> int:
    """What `work` returns; 2 for a mistake in the command or its input, 1 for a failure, 130 for Ctrl-C."""
    try:
        return work()
    except (*_MISTAKES, *_FAILURES) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _MISTAKES) else 1
    except KeyboardInterrupt:
        print(f"{name}: stopped; start the same command again to go on", file=sys.stderr)
        return STOPPED
