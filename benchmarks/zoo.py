"""Try the library on one model of every family of timm, torchvision and Hugging Face transformers, with random weights.

    python benchmarks/zoo.py                              # all sources that are installed; results/zoo.csv
    python benchmarks/zoo.py --source timm --processes 8 --seconds 600
    python benchmarks/zoo.py --only swinv2 --compile all
    python benchmarks/zoo.py --document                   # write the table of docs/any-model.md from the file

Each model gives one row: how its sites were found and how many there are, whether both rules run and give finite
answers, how far the answer of an image alone is from its answer in a batch (beside the model's own such distance,
relative to the spread of its outputs), whether the state_dict is the model's, and, for a sample of models, whether the
corrected module compiles as one graph and exports where the model itself does. Models that were quick before come
first, compiling last. Rows are written as they are done. Those that are there already, for the same versions, are not
computed again, so an interrupted run continues. timm needs no torchvision for its models: where that does not import,
empty modules stand in for it.

The parts: `zoo_models` lists the models, `zoo_trial` tries one, `zoo_workers` runs trials side by side, `zoo_table`
says what the rows mean.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from zoo_models import SOURCES
from zoo_table import DOCUMENT, RESULTS, document, read, write
from zoo_trial import versions
from zoo_workers import ZooJob, run

SAMPLE = {"timm": 14, "torchvision": 6, "transformers": 37}  # models that are compiled and exported
UNKNOWN = 1000.0  # seconds; a model that was never tried comes after all others


def relevant(text: str, source: str) -> dict[str, str]:
    """The versions that matter for models of a source."""
    known = json.loads(text)
    return {key: known.get(key, "") for key in ("trueup", "torch", source)}


def jobs_of(options: argparse.Namespace, rows: list[dict[str, Any]], now: str) -> list[ZooJob]:
    """Trials to run: quick models first, compiling last."""
    there = {(row["source"], row["model"]): row for row in rows}
    before = {(row["source"], row["model"]): float(row["seconds"] or UNKNOWN) for row in read(RESULTS)}
    trials, samples = [], []
    for source in options.source or SOURCES:
        try:
            cases = list(SOURCES[source]())
        except (ImportError, RuntimeError) as error:
            print(f"{source}: {error}")
            continue
        every = max(1, len(cases) // SAMPLE[source])
        for number, case in enumerate(cases):
            if options.only not in case.model:
                continue
            row = there.get((source, case.model))
            same = row is not None and (options.missing or relevant(row["versions"], source) == relevant(now, source))
            if not same or (options.again and row and row["error"]):
                row = None
                trials.append(ZooJob(source, case.family, case.model))
            sampled = {"all": True, "none": False}.get(options.compile, number % every == 0)
            if sampled and not (row and row["compiles"]):
                samples.append(ZooJob(source, case.family, case.model, portability=True))

    def expected(job: ZooJob) -> float:
        return before.get((job.source, job.model), UNKNOWN)

    return [*sorted(trials, key=expected), *sorted(samples, key=expected)]


def main() -> None:
    """Run the trials that the command line asks for, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        action="append",
        choices=list(SOURCES),
        help="source of models; repeatable (default: all that are installed)",
    )
    parser.add_argument("--only", default="", help="only models whose names contain this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit", type=int, default=240, help="seconds per trial")
    parser.add_argument(
        "--seconds", type=int, default=3600, help="seconds in all; models that are not done by then are left out"
    )
    parser.add_argument(
        "--compile", choices=["all", "sample", "none"], default="sample", help="models to compile and export"
    )
    parser.add_argument("--again", action="store_true", help="try models again that failed")
    parser.add_argument("--missing", action="store_true", help="only models without a row of any version")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--document", action="store_true", help="only write the table of the document")
    options = parser.parse_args()
    rows = read(options.out)
    if options.document:
        DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    end, now = time.monotonic() + options.seconds, versions()
    jobs = jobs_of(options, rows, now)
    by_model = {(row["source"], row["model"]): row for row in rows}
    found = run(jobs, processes=options.processes, limit=options.limit, end=end, device=options.device)
    done = 0
    for done, (job, row) in enumerate(found, start=1):
        key = (job.source, job.model)
        by_model[key] = (by_model.get(key, {}) if job.portability else {}) | row | {"versions": now}
        write(options.out, list(by_model.values()))
        said = (row.get("compiles", "took too long"), row.get("exports", "")) if job.portability else row["error"]
        print(f"{done}/{len(jobs)} {job.source} {job.model} {said or 'ok'}", flush=True)
    if done < len(jobs):
        print(f"stopped after {done} of {len(jobs)} trials; run again to go on")


if __name__ == "__main__":
    main()
