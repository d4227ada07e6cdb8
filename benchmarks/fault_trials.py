"""Trials of benchmarks/faults.py: kill, double or starve a command, and judge the files that it leaves."""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from fault_commands import EXPORT, TRAIN, Ended, Running, Task, run, write_root

KINDS = ("survived", "clear", "unexplained", "silent")


class Bench:
    """A scratch folder, the small data root, and the results of undisturbed runs."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.scratch, self.chance = scratch, random.Random(seed)
        self.root = write_root(scratch / "root")
        self._references: dict[str, tuple[object, float]] = {}

    @contextlib.contextmanager
    def place(self, within: Path | None = None) -> Iterator[Path]:
        """Yield a new folder that is also a data root."""
        place = Path(tempfile.mkdtemp(dir=within or self.scratch))
        try:
            for entry in self.root.iterdir():
                (place / entry.name).symlink_to(entry)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def ready(self, task: Task, place: Path) -> None:
        """Prepare a folder for a task."""
        if task.name == EXPORT.name:
            (place / "runs" / "digits-bn").mkdir(parents=True, exist_ok=True)
            for file in self.trained.iterdir():
                shutil.copy(file, place / "runs" / "digits-bn")

    @functools.cached_property
    def trained(self) -> Path:
        with self.place() as place:
            ended = run(*TRAIN.command(place))
            assert ended.status == 0, ended.output
            shutil.copytree(place / "runs" / "digits-bn", self.scratch / "trained")
        return self.scratch / "trained"

    def reference(self, task: Task) -> tuple[object, float]:
        """Return the result of an undisturbed run, and the seconds that it takes."""
        if task.name not in self._references:
            with self.place() as place:
                self.ready(task, place)
                began = time.monotonic()
                ended = run(*task.command(place))
                assert ended.status == 0, f"{task.name}: {ended.output}"
                self._references[task.name] = task.result(place), time.monotonic() - began
        return self._references[task.name]

    def judge(self, task: Task, place: Path, ended: Ended, before: tuple[Ended, ...] = ()) -> str:
        """Return the kind of outcome after a command that ran to its end."""
        for each in (*before, ended):
            if each.status not in (0, 2, -signal.SIGKILL) or (each.status == 2 and not each.clear):
                return noted("unexplained", task.name, each.output)
        if ended.status == 2:
            return "clear"
        try:
            right = task.result(place) == self.reference(task)[0]
        except Exception:
            return noted("silent", task.name, traceback.format_exc())
        if not right:
            return noted("silent", task.name, ended.output)
        return "clear" if any(each.status == 2 for each in before) else "survived"


def noted(kind: str, name: str, output: str) -> str:
    print(f"  {kind}: {name}: {output[-1500:]}", file=sys.stderr)
    return kind


def killed_then(bench: Bench, first: Task, then: Task) -> str:
    """Kill a command at a random moment, then run one to its end."""
    _, seconds = bench.reference(first)
    bench.reference(then)
    with bench.place() as place:
        bench.ready(first, place)
        bench.ready(then, place)
        running = Running(first.command(place))
        time.sleep(bench.chance.uniform(0, 1.1 * seconds))
        running.kill()
        before = running.wait()
        return bench.judge(then, place, run(*then.command(place)), (before,))


def killed_often(bench: Bench, task: Task) -> str:
    """Kill a command three times, each time later in it, then let it end."""
    _, seconds = bench.reference(task)
    with bench.place() as place:
        bench.ready(task, place)
        for _ in range(3):
            running = Running(task.command(place))
            time.sleep(bench.chance.uniform(0, seconds))
            running.kill()
            running.wait()
        return bench.judge(task, place, run(*task.command(place)))


def two_at_once(bench: Bench, first: Task, second: Task) -> str:
    """Run two commands at the same time, then both again, one after the other."""
    with bench.place() as place:
        ends = _together(bench, place, first, second)
        outcomes = [bench.judge(task, place, run(*task.command(place)), ends) for task in (first, second)]
        return max(outcomes, key=KINDS.index)


def two_at_once_without_repair(bench: Bench, first: Task, second: Task) -> str:
    """Run two commands at the same time; what they leave must be right as it is."""
    with bench.place() as place:
        ends = _together(bench, place, first, second)
        if all(each.status == 2 for each in ends):
            return noted("unexplained", first.name, ends[0].output)
        done = [(task, each) for task, each in zip((first, second), ends, strict=True) if each.status != 2]
        outcomes = [bench.judge(task, place, each, ends) for task, each in done]
        return max(outcomes, key=KINDS.index)


def _together(bench: Bench, place: Path, *tasks: Task) -> tuple[Ended, ...]:
    """Run commands at the same time, and return how they ended."""
    for task in tasks:
        bench.reference(task)
        bench.ready(task, place)
    pair = [Running(task.command(place)) for task in tasks]
    return tuple(running.wait() for running in pair)


def full_disk(bench: Bench, task: Task) -> str:
    """Run a command on a disk that is too small, then on one that is large enough."""
    bench.reference(task)
    disk = bench.scratch / "disk"
    disk.mkdir(exist_ok=True)
    kilobytes = int(4 ** bench.chance.uniform(2, 6))  # 16 KB to 4 MB, small ones as often as large ones
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return "untried"
    try:
        with bench.place(disk) as place:
            with contextlib.suppress(OSError):  # what the task needs may not fit either
                bench.ready(task, place)
            first = run(*task.command(place))
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            bench.ready(task, place)
            return bench.judge(task, place, run(*task.command(place)), (first,))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
