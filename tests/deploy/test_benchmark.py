"""The command that measures the routes of deployment."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def deployment(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("deployment")


def row(deployment, route, rule="no gate", batch=1):
    return deployment.DeploymentRow(
        route, rule, "torch", batch, 0.0, 1.0, 1.0, 2.0, "ms", 2.0, None, None, None, None, "versions"
    )


def test_rows_are_written_in_one_order_whatever_was_measured_first(deployment):
    routes = [*deployment.ROUTES]
    wanted = [row(deployment, route, rule, n) for route in routes for rule in deployment.RULES for n in (1, 32)]
    wanted += [row(deployment, f"serving, {name}") for name in ("two cores", "1 serving thread", "8 serving threads")]
    serving, others = wanted[-3:], wanted[:-3]
    assert deployment.in_order([*serving[:1], *reversed(others), *serving[1:]]) == wanted


def test_serving_goes_on_with_the_rows_that_are_missing(deployment, monkeypatch):
    measured = []
    monkeypatch.setattr(deployment, "memory_works", lambda: ("small", {"corrected": "c", "measure": "m"}))
    monkeypatch.setattr(deployment, "growth", lambda work, calls: measured.append(work) or 1.0)
    monkeypatch.setattr(deployment, "rate", lambda network, x, threads: measured.append(threads) or 1.0)
    monkeypatch.setattr(deployment, "in_turns", lambda networks, x, *rest: measured.append("turns") or [1.0, 2.0])
    every = [found.route for found in deployment.serving(None, None, [0], 10, ())]
    assert every[0] == "serving, two cores"
    assert len(every) == len(set(every)) == 5
    assert measured == ["turns", *[1] * 6, *[8] * 6, "small", "c", "m"]
    measured.clear()
    rest = deployment.serving(None, None, [0], 10, {*every[:3], every[4]})
    assert [found.route for found in rest] == every[3:4]
    assert measured == ["small", "c"]
