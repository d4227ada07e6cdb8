"""Kill, interleave, starve and damage the commands of trueup, and count the outcomes.

    make test-faults                      # all scenarios, for some minutes; writes results/faults.csv
    python benchmarks/faults.py --rounds 2 --only kill

Each scenario is tried many times with random moments and places. Every trial ends with a command that runs to its end,
and its result is compared with that of an undisturbed run:

survived     the result is the same
clear        the command refused, with one line that names what is wrong (and the result is right once that is mended)
unexplained  it failed without such a line, or could not be continued
silent       it said nothing, and the result is wrong

Commands run in forked processes, so that they are killed at their work and not while torch is imported.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a process with one thread can be forked

import argparse
import contextlib
import functools
import importlib
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import trueup
from fault_commands import EVALUATE, EXPORT, GET, MAKES, MODEL, TRAIN, evaluate_task, make_task, serve, train_task
from fault_files import damage_and_read, kept_files
from fault_trials import KINDS, Bench, full_disk, killed_often, killed_then, two_at_once, two_at_once_without_repair
from trueup_lab.data import digits
from trueup_lab.data.images import NORMALISATION, Images
from trueup_lab.data.sets import SETS, ImageSet
from trueup_lab.models import zoo
from trueup_lab.tables import write_table


@dataclass(frozen=True)
class FaultRow:
    """Outcomes of one scenario."""

    fault: str
    what: str
    tried: int
    survived: int
    clear: int
    unexplained: int
    silent: int


def warm_up(some: Images) -> None:
    """Import and compile what commands need, so that forked processes find it done."""
    importlib.import_module("torch._dynamo")
    model, x = zoo.load(MODEL), NORMALISATION["digits"](some.images)
    with torch.inference_mode():
        trueup.correct(model, trueup.calibrate(model, [x[:8]], decide=False), trueup.Correction())(x[:8])


def scenarios(bench: Bench) -> dict[tuple[str, str], Callable[[], str]]:
    """Return every scenario by fault and subject."""
    found: dict[tuple[str, str], Callable[[], str]] = {}
    for task in (*(tasks[0] for tasks in MAKES.values()), EVALUATE, TRAIN, GET, EXPORT):
        found["kill, then the same", task.name] = functools.partial(killed_then, bench, task, task)
        found["kill three times", task.name] = functools.partial(killed_often, bench, task)
        found["full disk", task.name] = functools.partial(full_disk, bench, task)
    others = [
        *((old, new) for old, new in MAKES.values()),
        *((new, old) for old, new in MAKES.values()),
        (MAKES["cifar10-c"][0], make_task("cifar10-c", 0, "fog")),
        (EVALUATE, evaluate_task("uncorrected", "bn-mix", seed=7)),
        (EVALUATE, evaluate_task("uncorrected", corruption="stripe")),
        (TRAIN, train_task(2)),
    ]
    for old, new in others:
        found["kill, then another", f"{old.name}; {new.name}"] = functools.partial(killed_then, bench, old, new)
    for task in (*(tasks[0] for tasks in MAKES.values()), EVALUATE, TRAIN, GET, EXPORT):
        found["two at once", task.name] = functools.partial(two_at_once_without_repair, bench, task, task)
    fog = make_task("cifar10-c", 0, "fog")
    found["two at once", f"{MAKES['cifar10-c'][0].name}; {fog.name}"] = functools.partial(
        two_at_once_without_repair, bench, MAKES["cifar10-c"][0], fog
    )
    for old, new in MAKES.values():
        found["two at once", f"{old.name}; {new.name}"] = functools.partial(two_at_once, bench, old, new)
    found["two at once", "evaluate with two seeds"] = functools.partial(
        two_at_once_without_repair, bench, EVALUATE, evaluate_task("uncorrected", "bn-mix", seed=7)
    )
    return found


def main(arguments: list[str] | None = None) -> list[FaultRow]:
    """Run the scenarios, print the table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="trials of each scenario with processes")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="after this time, the remaining trials run once each"
    )
    parser.add_argument("--mutations", type=int, default=2000, help="damaged versions of each kind of file")
    parser.add_argument("--only", default="", help="only scenarios whose names match this regular expression")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="random seed for the moments and places of faults"
    )
    parser.add_argument("--out", type=Path, help="CSV file of the table")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    images = {split: digits.load(split).first(64) for split in ("train", "test")}
    few = ImageSet("digits", lambda split, _: images[split], image_channels=1)
    warm_up(images["train"])
    rows = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ends:
        SETS["digits"] = few
        bench = Bench(Path(scratch), options.seed)
        server = serve(bench.scratch)
        ends.callback(os.waitpid, server, 0)
        ends.callback(os.kill, server, signal.SIGKILL)
        for (fault, what), trial in scenarios(bench).items():
            if re.search(options.only, f"{fault}: {what}"):
                rows.append(_row(fault, what, Counter(trial() for _ in _until(options.rounds, end))))
        for kept in kept_files(bench):
            if re.search(options.only, f"damaged file: {kept.name}"):
                folder = Path(tempfile.mkdtemp(dir=scratch))
                path = kept.write(folder)
                content, wanted = path.read_bytes(), kept.read(path)
                count = Counter(
                    damage_and_read(kept, path, content, bench.chance, wanted) for _ in range(options.mutations)
                )
                rows.append(_row("damaged file", kept.name, count))
    print(f"\nseed {options.seed}")
    print(table(rows))
    if options.out:
        write_table(options.out, FaultRow, rows)
    return rows


def _until(rounds: int, end: float) -> Iterator[int]:
    """Count rounds, at least one, until a moment of `time.monotonic`."""
    for number in range(rounds):
        if number and time.monotonic() > end:
            return
        yield number


def _row(fault: str, what: str, count: Counter[str]) -> FaultRow:
    row = FaultRow(fault, what, sum(count[kind] for kind in KINDS), *(count[kind] for kind in KINDS))
    print(f"{fault}: {what}: {dict(count)}", flush=True)
    return row


def table(rows: list[FaultRow]) -> str:
    """Return the sums by fault as text."""
    lines = [f"{'fault':24}" + "".join(f"{name:>12}" for name in ("tried", *KINDS))]
    for fault in (*dict.fromkeys(row.fault for row in rows), "all"):
        mine = [row for row in rows if fault in (row.fault, "all")]
        sums = [sum(getattr(row, name) for row in mine) for name in ("tried", *KINDS)]
        lines.append(f"{fault:24}" + "".join(f"{value:12}" for value in sums))
    return "\n".join(lines)


if __name__ == "__main__":
    failed = [row for row in main() if row.silent or row.unexplained]
    sys.exit(1 if failed else 0)
