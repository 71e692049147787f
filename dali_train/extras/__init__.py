"""What builds on a run or a dataset, and hangs on by rows of the core's tables. Nothing outside imports from here."""
