"""Evaluation: methods behind one protocol, streams of images, metrics, and a runner that fills a CSV file."""

from trueup_lab.evaluation.jobs import row_kind
from trueup_lab.evaluation.methods import (
    BatchStatistics,
    Correct,
    CorrectMixed,
    Method,
    Mixed,
    Needs,
    Realign,
    Tent,
    Uncorrected,
    as_method,
    parse_method,
)
from trueup_lab.evaluation.metrics import accuracy, calibration_error, mean_corruption_error, mean_iou
from trueup_lab.evaluation.per_image import read_counts
from trueup_lab.evaluation.plan import EvaluationProgress, Plan
from trueup_lab.evaluation.rows import EvaluationRow, SegmentationRow, read_rows
from trueup_lab.evaluation.runner import evaluate
from trueup_lab.evaluation.sets import Benchmark, Case
from trueup_lab.evaluation.streams import STREAMS, Stream
from trueup_lab.evaluation.subjects import Subject, read_subjects

__all__ = [
    "STREAMS",
    "BatchStatistics",
    "Benchmark",
    "Case",
    "Correct",
    "CorrectMixed",
    "EvaluationProgress",
    "EvaluationRow",
    "Method",
    "Mixed",
    "Needs",
    "Plan",
    "Realign",
    "SegmentationRow",
    "Stream",
    "Subject",
    "Tent",
    "Uncorrected",
    "accuracy",
    "as_method",
    "calibration_error",
    "evaluate",
    "mean_corruption_error",
    "mean_iou",
    "parse_method",
    "read_counts",
    "read_rows",
    "read_subjects",
    "row_kind",
]
