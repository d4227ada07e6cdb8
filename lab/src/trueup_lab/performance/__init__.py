"""The cost of the correction. Every number is a ratio of two costs measured side by side."""

from trueup_lab.performance.cases import CASES, PerformanceCase
from trueup_lab.performance.rows import TimingRow, read_timings, write_timings

__all__ = ["CASES", "PerformanceCase", "TimingRow", "read_timings", "write_timings"]
