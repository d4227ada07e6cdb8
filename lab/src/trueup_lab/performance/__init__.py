"""The cost of the correction. Every number is a ratio of two costs measured side by side."""

from trueup_lab.performance.cases import CASES, PerformanceCase
from trueup_lab.performance.rows import TimingRow, read_timings, write_timings

Row = TimingRow  # the old name, until the figures import TimingRow

__all__ = ["CASES", "PerformanceCase", "Row", "TimingRow", "read_timings", "write_timings"]
