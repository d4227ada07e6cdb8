"""Shared by all tests: the data root, and skipping tests whose data it lacks."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

from trueup.decide import reasons
from trueup_lab.data.root import data_root

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def data_path():
    """Path of something under the data root; the test is skipped where it is missing."""

    def find(*parts: str) -> Path:
        path = data_root().joinpath(*parts)
        if not path.exists():
            pytest.skip(f"{path} is not there; set TRUEUP_DATA to a data root that holds it")
        return path

    return find


@pytest.fixture(scope="module")
def one_answer_is_enough():
    """Networks that were not trained answer all images alike, for which calibration would leave them alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasons, "MOST_ALIKE", 1.0)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no core is left with one of them at the end."""
    items.sort(key=lambda item: "in_the_interpreter" not in item.name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
