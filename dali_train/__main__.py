import sys

from dali_train.cli import main

sys.exit(main())
