"""What the correction costs: every number a ratio of two things measured side by side."""

from trueup_lab.performance.cases import CASES, Case
from trueup_lab.performance.rows import Row, read_rows, write_rows

__all__ = ["CASES", "Case", "Row", "read_rows", "write_rows"]
