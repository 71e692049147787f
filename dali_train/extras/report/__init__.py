"""``dali-train report``: run directories as an HTML page. It only reads files, and does not import torch."""

from dali_train.extras.report.page import write_report

__all__ = ["write_report"]
