"""What builds on a run or a dataset, and hangs on by rows of the core's tables.

Of what is here the core imports only the settings in the `__init__.py` of a folder, by config/extra_settings.py.
"""

import dali_train.config  # noqa: F401  # first, since it imports those settings
