"""The life of a process: launch, process group, stop, status, lock, watchdog."""
