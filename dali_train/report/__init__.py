"""``dali-train report``: what run directories hold, as a page. Reads files only, imports no torch."""

from dali_train.report.page import write_report

__all__ = ["write_report"]
