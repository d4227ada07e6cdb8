"""One measured accuracy and everything that made it, as a row of a CSV file."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trueup_lab.tables import read_table


@dataclass(frozen=True)
class EvaluationRow:
    """The result of one model and method on one test set.

    Stateless methods have `stream` "any" and `batch` 0, since their results are the same in every stream. For a
    method whose memory lasts from set to set, `stream` ends in a four-digit hash of the sequence of sets. `calibrated`
    is 0 for methods without calibration.
    """

    model: str
    seed: int  # of the model
    method: str
    stream: str
    batch: int
    corruption: str
    severity: int
    images: int
    accuracy: float  # percent
    calibration_error: float  # percent, 15 bins
    ms: float  # per image
    data: str  # clean, published or generated
    data_seed: int
    calibrated: int  # number of clean images
    needs: str
    checkpoint: str  # first digits of the SHA-256 of the model's file
    trueup: str
    torch: str
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """Everything but the results, the versions and the device. Rows with equal keys are the same measurement."""
        return (
            self.model, self.seed, self.method, self.stream, self.batch, self.corruption, self.severity, self.images,
            self.data, self.data_seed, self.calibrated, self.checkpoint,
        )  # fmt: skip


@dataclass(frozen=True)
class SegmentationRow(EvaluationRow):
    """The result of one model and method on one test set with a class per pixel.

    Accuracy and calibration error are over pixels. `set_aside` k means that every k-th test image was used for
    calibration (without its labels) and not for testing. 0 means that training images were used, and all test images
    tested.
    """

    mean_iou: float  # percent, over the classes that occur
    iou: str  # percent per class, separated by slashes; empty for a class that does not occur
    set_aside: int
    rule: str  # the rule that was applied, for methods of trueup

    @property
    def key(self) -> tuple[object, ...]:
        """The key of any row, and the number of `set_aside`."""
        return (*super().key, self.set_aside)


def read_rows(path: str | os.PathLike[str]) -> list[EvaluationRow]:
    """Return the rows of a results file, or no rows if it does not exist."""
    return [*read_table(path, EvaluationRow)]
