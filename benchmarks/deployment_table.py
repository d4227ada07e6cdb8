"""Tables of docs/deployment.md, from results/deployment.csv and results/quantised.csv.

python benchmarks/deployment_table.py            # rewrite the tables
python benchmarks/deployment_table.py --check    # fail if the document does not show what the files hold
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "deployment.md"


def main() -> None:
    """Rewrite or check the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = text
    for name, lines in {"deployment": deployment(), "quantised": quantised()}.items():
        block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])
        wanted = re.sub(f"<!-- {name} -->.*<!-- /{name} -->", lambda _, block=block: block, wanted, flags=re.DOTALL)
    if parser.parse_args().check:
        if text != wanted:
            raise SystemExit(f"{DOCUMENT} does not show its files; run python benchmarks/deployment_table.py")
    else:
        DOCUMENT.write_text(wanted, encoding="utf-8")


def deployment() -> list[str]:
    """One line per route and batch size, with and without a gate, and one per way of serving."""
    rows = _read("deployment")
    gated = {(row["route"], row["batch"]): row for row in rows if row["rule"] == "gated"}
    lines = [
        "| route | imports | batch | difference | model | corrected | ratio | ratio with a gate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["rule"] != "no gate":
            continue
        unit = "ms" if row["unit"].startswith("ms") else row["unit"]
        digits = 2 if unit == "ms" else 0
        times = [f"{float(row[key]):.{digits}f} {unit}" for key in ("model", "corrected")]
        ratio = "" if unit.startswith("bytes") else row["ratio"]
        other = gated.get((row["route"], row["batch"]), {}).get("ratio", "")
        cells = [row["route"], row["needs"], row["batch"], row["difference"], *times, ratio, other]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def quantised() -> list[str]:
    """Means over the corrupted sets, one line per network."""
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in _read("quantised"):
        network = "corrected" if row["rule"] else "model"
        groups[row["quantisation"], network, row["order"]][
            "clean" if row["corruption"] == "clean" else "corrupted"
        ].append(row)
    lines = [
        "| quantisation | network | clean accuracy | corrupted accuracy | agreement, clean | agreement, corrupted |",
        "|---|---|---|---|---|---|",
    ]
    for (quantisation, network, order), sets in groups.items():
        cells = [f"{100 * fmean(float(row[key]) for row in sets[kind]):.1f}" for key, kind in _COLUMNS]
        name = f"{network} ({order})" if order else network
        lines.append(f"| {quantisation} | {name} | {' | '.join(cells)} |")
    return lines


_COLUMNS = [(key, kind) for key in ("accuracy", "agreement") for kind in ("clean", "corrupted")]


def _read(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
