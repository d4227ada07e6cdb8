"""A report that people open: one HTML file on what a model's images look like and what trueup does with them.

from trueup.report import write_report
write_report("report.html", model, targets, images)
write_report("report.html", model, targets, this_week, against=last_week)
"""

from trueup.report.findings import Findings, SetFindings, find
from trueup.report.page import page_of
from trueup.report.write import write_report

__all__ = ["Findings", "SetFindings", "find", "page_of", "write_report"]
