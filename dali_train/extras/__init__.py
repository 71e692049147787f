"""What builds on a run or a dataset, and hangs on by rows of the core's tables.

Outside, only config/extra_settings.py imports from here: the settings in the `__init__.py` of a folder.
"""

import dali_train.config  # noqa: F401  # first, since it imports those settings
