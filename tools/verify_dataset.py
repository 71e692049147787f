"""``dali-train data verify`` under the name that scripts know; `--help` explains."""

import sys
from functools import partial

from dali_train.commands import data

main = partial(data.main, "verify")

if __name__ == "__main__":
    sys.exit(main())
