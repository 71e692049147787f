"""What builds on a run or a dataset, and hangs on by rows of the core's tables.

Nothing outside imports from here but the settings in the `__init__.py` of a folder, see config/extra_settings.py.
"""
