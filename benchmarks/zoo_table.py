"""Summary of results/zoo.csv: the models that work, and the table of docs/any-model.md."""

from __future__ import annotations

import collections
import csv
import json
from pathlib import Path
from typing import Any

from zoo_models.of_timm import POPULAR
from zoo_trial import COLUMNS

RESULTS = Path(__file__).parents[1] / "results" / "zoo.csv"
DOCUMENT = Path(__file__).parents[1] / "docs" / "any-model.md"


def works(row: dict[str, Any]) -> bool:
    """Whether every trial of a model succeeded."""
    ran = row["error"] == "" and "changes nothing" not in (row["evidence"], row["correction"])
    ran = ran and "runs" in (row["evidence"], row["correction"])
    kept = row["finite"] == row["state_dict"] == "True"
    portable = not any(row[key].startswith("no") for key in ("compiles", "exports"))
    return ran and kept and portable and alone_as_together(row)


def alone_as_together(row: dict[str, Any]) -> bool:
    """Whether an image's answer alone and in a batch differs little more under `Evidence` than in the model itself.

    The paper's rule is discontinuous at zero, so that rounding may move a value by a whole step: it is not counted.
    """
    own, other = (float(row[key] or 0) for key in ("own_difference", "evidence_difference"))
    return not other > 10 * own + 1e-3


def table(rows: list[dict[str, Any]]) -> str:
    """Counts per source, the models that do not work, and the versions, in Markdown."""
    lines = [
        "| models | tried | work | of these traced, watched | compile and export, of those tried |",
        "|" + "---|" * 5,
    ]
    groups = {
        "timm, one per family": lambda row: row["source"] == "timm" and row["family"] != "popular",
        "timm, popular": lambda row: row["source"] == "timm" and row["model"] in POPULAR,
        "torchvision": lambda row: row["source"] == "torchvision",
        "transformers": lambda row: row["source"] == "transformers",
    }
    for name, belongs in groups.items():
        some = [row for row in rows if belongs(row)]
        good = [row for row in some if works(row)]
        traced = sum(row["traced"] == "True" for row in good)
        sampled = [row for row in some if row["compiles"]]
        portable = sum(row["compiles"] == row["exports"] == "yes" for row in sampled)
        lines.append(
            f"| {name} | {len(some)} | {len(good)} | {traced}, {len(good) - traced} | {portable} of {len(sampled)} |"
        )
    bad = [f"`{row['model']}` ({row['error'] or 'see the file'})" for row in rows if not works(row)]
    lines += ["", f"Not: {', '.join(bad)}."] if bad else []
    lines += ["", *(f"{count} models with {name}." for name, count in _versions(rows).most_common())]
    return "\n".join(lines) + "\n"


def _versions(rows: list[dict[str, Any]]) -> collections.Counter[str]:
    """Number of rows per version of torch and of the package that a model comes from."""
    known = [(json.loads(row["versions"]), row["source"]) for row in rows]
    return collections.Counter(f"torch {found['torch']} and {source} {found[source]}" for found, source in known)


def document(text: str, rows: list[dict[str, Any]]) -> str:
    """The text of the document, with the table in it."""
    before, _, rest = text.partition("<!-- zoo -->\n")
    return f"{before}<!-- zoo -->\n{table(rows)}<!-- /zoo -->{rest.partition('<!-- /zoo -->')[2]}"


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows, in a fixed order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["source"], row["family"], row["model"])))
    beside.replace(path)
