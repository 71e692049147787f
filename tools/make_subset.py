"""``dali-train data subset`` under the name that scripts know; `--help` explains."""

import sys
from functools import partial

from dali_train.commands import data

main = partial(data.main, "subset")

if __name__ == "__main__":
    sys.exit(main())
