"""``dali-train report``: what a run directory holds, as one page and pictures. Reads files only, imports no torch."""

from dali_train.report.page import write_report

__all__ = ["write_report"]
