"""What builds on a run or a dataset, and hangs on by rows of the core's tables.

Nothing outside imports from here but settings.py of a folder, whose settings a section of the config inherits.
"""
