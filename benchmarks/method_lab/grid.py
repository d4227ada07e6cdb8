"""Which rules are tried, with which constants: tiers, the most telling first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rules import Bands, Evidence, Gated, Mix, Paper


def evidence(*args: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"norm": Evidence(*args, **options)}


def bands(*args: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"norm": Bands(*args, **{"unit": "budget", "first": 7, **options})}


def gated(budget: float, closed: float = 0.4, opened: float = 0.02, paper: float = 0.0, **options: Any) -> Any:
    """Evidence with bands at every site, behind the gate."""

    def make() -> dict[str, Any]:
        bands = {"unit": "budget", "shape": 1.0, **options}
        rules: dict[str, Any] = {"norm": Gated(budget, closed=closed, opened=opened, **bands)}
        return rules | ({"layer": Paper(paper)} if paper else {})

    return make


Config = tuple[str, Callable[[], dict[str, Any]], bool]  # name, rules, calibrated layer by layer


def configs() -> list[list[Config]]:
    """Tiers of rules, the most informative first. A rule's first number is its strength."""
    rivals: list[Config] = [("uncorrected", dict, False)]
    rivals += [(f"bn-mix N={n}", lambda n=n: {"norm": Mix(n)}, False) for n in (4, 8, 16, 32)]
    rivals += [(f"paper keep {c}", lambda c=c: {"layer": Paper(c)}, False) for c in (0.25, 0.8)]
    rivals += [("paper match 0.5", lambda: {"layer": Paper(0.5, "match")}, False)]
    gate: list[Config] = [
        (f"gate {c}-{o} bands {b}", gated(b, c, o), False)
        for c, o, budgets in ((0.4, 0.02, (0.02, 0.04, 0.08)), (0.2, 0.01, (0.04, 0.08)), (0.1, 0.005, (0.04,)))
        for b in budgets
    ]
    gate += [("gate 0.4-0.02 bands 0.04, probabilities mixed", gated(0.04, mode="mix"), False)]
    gate += [("gate 0.4-0.02 bands 0.08, probabilities mixed", gated(0.08, mode="mix"), False)]
    gate += [("gate 0.4-0.02 bands 0.08, no probe", gated(0.08, start=7), False)]
    gate += [("gate 0.4-0.02 bands 0.04 + paper 0.25", gated(0.04, paper=0.25), False)]
    gate_more: list[Config] = [("gate 0.4-0.1 bands 0.04", gated(0.04, 0.4, 0.1), False)]
    gate_more += [("gate 1.0-0.05 bands 0.04", gated(0.04, 1.0, 0.05), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 robust", gated(0.04, robust=True), False)]
    gate_more += [("gate 0.02 hard bands 0.04", gated(0.04, 0.0201, 0.02), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04, weights times g", gated(0.04, mode="weight"), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04, no probe", gated(0.04, start=7), False)]
    gate_more += [
        (f"gate 0.4-0.02 bands 0.04 at site {n}", gated(0.04, gate_sites=sites), False)
        for n, sites in (("1", (1,)), ("6", (6,)), ("7", (7,)), ("8-10", (8, 9, 10)), ("1,7", (1, 7)))
    ]
    gate_more += [("gate 0.4-0.02 bands 0.04 first7", gated(0.04, first=7), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 pool.5", gated(0.04, pool=0.5), False)]
    gate_more += [("gate 0.4-0.02 bands 0.06 square", gated(0.06, weight="square"), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 shape2", gated(0.04, shape=2.0), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 + paper 0.5", gated(0.04, paper=0.5), False)]
    gate_more += [("gate 0.4-0.02 bands 0.16", gated(0.16), False)]
    core: list[Config] = [(f"channel k={k}", evidence(k), False) for k in (16, 32, 64)]
    core += [(f"layer k={k}", evidence(k, pool=1.0), False) for k in (8, 16)]
    core += [(f"budget {b}", evidence(b, unit="budget"), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} first7", bands(b), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} first7 shape", bands(b, shape=1.0), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} all shape", bands(b, first=1000, shape=1.0), False) for b in (0.01, 0.02)]
    more: list[Config] = [
        (f"budget {b} pool1", evidence(b, unit="budget", pool=1.0), False) for b in (0.01, 0.02, 0.04)
    ]
    more += [(f"budget {b} pool.5", evidence(b, unit="budget", pool=0.5), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 pool.5 shape", bands(b, pool=0.5, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first1 shape", bands(b, first=1, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first3 shape", bands(b, first=3, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 shape sequential", bands(b, shape=1.0), True) for b in (0.005, 0.01, 0.02)]
    more += [(f"budget {b} sequential", evidence(b, unit="budget"), True) for b in (0.005, 0.01, 0.02)]
    more += [(f"bands {b} side16 shape", bands(b, first=1000, least=16, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 shape square", bands(b, shape=1.0, weight="square"), False) for b in (0.02, 0.04)]
    more += [
        (f"bands {b} first7 shape square pool.5", bands(b, shape=1.0, weight="square", pool=0.5), False)
        for b in (0.01, 0.02, 0.04)
    ]
    more += [("bands 0.05 first7 shape, rest 0.01", bands(0.05, shape=1.0, rest=0.01), False)]
    more += [("bands 0.01 first7 shape, rest 0.03", bands(0.01, shape=1.0, rest=0.03), False)]
    more += [("bands 0.02 first7 shape clip", bands(0.02, shape=1.0, clip=0.98), False)]
    more += [("bands 0.02 first7 shape absolute", bands(0.02, shape=1.0, absolute=True), False)]
    more += [("budget 0.02 absolute", evidence(0.02, unit="budget", absolute=True), False)]
    more += [("budget 0.02 last14", evidence(0.02, unit="budget", last=14), False)]
    more += [("bands 0.02 first7 shape2", bands(0.02, shape=2.0), False)]
    more += [("bands 0.02 first7 3,5 shape", bands(0.02, sizes=(3, 5), shape=1.0), False)]
    more += [("bands 0.02 first7 5 shape", bands(0.02, sizes=(5,), shape=1.0), False)]
    more += [(f"bands k={k} first7 shape", bands(k, unit="spread", shape=1.0), False) for k in (16, 32, 64)]
    more += [
        ("channel k=16 robust", evidence(16, unit="robust"), False),
        ("exceed 2", evidence(2, unit="exceed"), False),
    ]
    more += [(f"{w} {k}", evidence(k, weight=w), False) for w, k in (("james", 4), ("soft", 4), ("square", 12))]
    more += [("joint k=24", evidence(24, joint=True), False), ("carry k=24", evidence(24, carry=0.5), False)]
    more += [(f"{p} only k=16", evidence(16, parts=p), False) for p in ("mean", "scale")]

    def both(*, kappa: float = 0.0, step: float = 0.8, budget: float = 0.02) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "norm": Bands(budget, unit="budget", first=7, shape=1.0),
            "layer": Paper(step, kappa=kappa),
        }

    combined: list[Config] = [("bands 0.02 first7 shape + paper by evidence k=16", both(kappa=16), False)]
    combined += [("bands 0.01 first7 shape + paper by evidence k=16", both(kappa=16, budget=0.01), False)]
    combined += [("bands 0.02 first7 shape + paper by evidence k=16, sequential", both(kappa=16), True)]
    combined += [("bands 0.02 first7 shape + paper 0.25", both(step=0.25), False)]
    combined += [("bands 0.02 first7 shape + paper 0.25, sequential", both(step=0.25), True)]
    more = combined + more
    last: list[Config] = [("paper by evidence k=16", lambda: {"layer": Paper(1.0, kappa=16)}, False)]
    last += [("paper match by evidence k=16", lambda: {"layer": Paper(1.0, "match", kappa=16)}, False)]
    for kind in ("pre", "post"):
        last += [(f"{kind} k={k}", lambda k=k, kind=kind: {kind: Evidence(k)}, False) for k in (16, 48)]
        last += [
            (f"{kind} budget {b}", lambda b=b, kind=kind: {kind: Evidence(b, unit="budget")}, False)
            for b in (0.01, 0.02)
        ]
    last += [
        (
            f"bands {b} first7 shape + head",
            lambda b=b: {
                "norm": Bands(b, unit="budget", first=7, shape=1.0),
                "head": Evidence(b, unit="budget", parts="mean"),
            },
            False,
        )
        for b in (0.01, 0.02)
    ]
    last += [
        (
            f"bands {b} first7 shape + input",
            lambda b=b: {
                "norm": Bands(b, unit="budget", first=7, shape=1.0),
                "input": Bands(b, unit="budget", shape=1.0),
            },
            False,
        )
        for b in (0.01, 0.02)
    ]
    last += [("pca budget 0.02", evidence(0.02, unit="budget", cov="pca"), False)]
    last += [("wiener", evidence(0.0, cov="wiener"), False)]
    last += [(f"mahalanobis k={k}", evidence(k, cov="mahalanobis", pool=1.0, shrink=0.2), False) for k in (8, 16)]
    return [rivals, gate, core[-6:], gate_more, core[:-6] + more, last]
