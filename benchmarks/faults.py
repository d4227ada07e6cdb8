"""Kill, interleave, starve and damage the commands of trueup, and count what comes of it.

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

import argparse
import contextlib
import functools
import hashlib
import http.server
import importlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process with one thread can be forked

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

import trueup
from trueup.cli import application
from trueup_lab.cli import add_commands
from trueup_lab.data import digits, download
from trueup_lab.data.corrupted_sets import imagenet_c, load
from trueup_lab.data.images import NORMALISATION, Images
from trueup_lab.data.sets import SETS, ImageSet
from trueup_lab.evaluation import read_rows
from trueup_lab.models import read_models, zoo
from trueup_lab.tables import write_table
from trueup_lab.training.checkpoint import load_checkpoint

MODEL = "resnet20-bn-digits"
KINDS = ("survived", "clear", "unexplained", "silent")


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


@dataclass(frozen=True)
class Ended:
    """How a command ended. `status` is negative if a signal ended it."""

    status: int
    said: str

    @property
    def clear(self) -> bool:
        """Whether it refused in one line that says what is wrong."""
        lines = [line for line in self.said.splitlines() if line.startswith("error: ")]
        return self.status == 2 and len(lines) == 1 and "Traceback" not in self.said


class Running:
    """A command in a process of its own."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._pid = os.fork()
        if self._pid:
            return
        status = 70
        try:
            os.dup2(self._log.fileno(), 1)
            os.dup2(self._log.fileno(), 2)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
            app = application()
            add_commands(app)
            app([str(argument) for argument in arguments], standalone_mode=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 71
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Wait for the end."""
        _, status = os.waitpid(self._pid, 0)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        self._log.close()
        return Ended(os.waitstatus_to_exitcode(status), said)


def run(*arguments: object) -> Ended:
    """Run a command to its end."""
    return Running(arguments).wait()


# ----------------------------------------------------------------------------------------------- data and commands


def write_root(root: Path) -> Path:
    """Write small clean sets in their published layouts: 60 test images of MNIST and CIFAR-10, and 12 of ImageNet."""
    rng = np.random.default_rng(0)
    count = 60
    raw, cifar = root / "MNIST" / "raw", root / "cifar-10-batches-py"
    raw.mkdir(parents=True)
    cifar.mkdir()
    grey = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = [k % 10 for k in range(count)]
    for part in ("t10k", "train"):
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + grey.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(labels))
    batch = {b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), b"labels": labels}
    for name in ("test_batch", *(f"data_batch_{k}" for k in range(1, 6))):
        (cifar / name).write_bytes(pickle.dumps(batch, protocol=2))
    for synset in ("n01440764", "n01443537"):
        folder = root / "imagenet" / "val" / synset
        folder.mkdir(parents=True)
        for k in range(6):
            coarse = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((300, 260)).save(folder / f"{synset}_{k}.JPEG")
    return root


Command = Callable[[Path], tuple[object, ...]]
Result = Callable[[Path], object]


@dataclass(frozen=True)
class Task:
    """A command that works in a folder, and what its result is: whatever must be equal after any interruption."""

    name: str
    command: Command
    result: Result


def _make(family: str, seed: int, only: str = "shot_noise") -> Task:
    severities = ("--severity", 3) if family == "imagenet-c" else ()

    def result(place: Path) -> object:
        if family == "imagenet-c":
            data = imagenet_c(only, 3, root=place, seed=seed)
            assert data.seed is None, "not read from the folder"
            return _digest(torch.stack([data[k][0] for k in range(len(data))]))
        found = load(family, only, None if family == "mnist-c" else 3, root=place, seed=seed)
        top = place / {"mnist-c": "MNIST-C", "cifar10-c": "CIFAR-10-C"}[family]
        assert any(top.rglob("*.npy")), "not made"
        return _digest(found.images), _digest(found.labels), found.origin

    return Task(
        f"data make {family}, seed {seed}" + ("" if only == "shot_noise" else f", {only}"),
        lambda place: ("data", "make", family, "--only", only, *severities, "--seed", seed, "--data", place),
        result,
    )


def _evaluate(*methods: str, seed: int = 0, corruption: str = "shot_noise") -> Task:
    chosen = [part for method in methods for part in ("--method", method)]
    limits = ("--images", 24, "--calibrate", 30, "--corruption", corruption, "--corruption", "fog", "--seed", seed)

    def result(place: Path) -> object:
        rows = [row for row in read_rows(place / "rows.csv") if row.data_seed in (0, seed)]
        mine = [row for row in rows if row.method in methods and row.corruption in (corruption, "fog")]
        return sorted((*row.key, row.accuracy, row.calibration_error) for row in mine if row.data_seed == seed)

    return Task(
        f"evaluate {', '.join(methods)}, seed {seed}",
        lambda place: (
            *("evaluate", MODEL, *chosen, *limits, "--device", "cpu"),
            *("--out", place / "rows.csv", "--targets", place / "targets"),
        ),
        result,
    )


def _train(epochs: int = 4) -> Task:
    def result(place: Path) -> object:
        tensors, facts = load_checkpoint(place / "runs" / "digits-bn" / "checkpoint.safetensors")
        record = json.loads((place / "runs" / "digits-bn" / "record.json").read_text(encoding="utf-8"))
        weights = {name: _digest(tensor) for name, tensor in sorted(tensors.items())}
        return weights, facts["epoch"], record["test_accuracy"]

    return Task(
        f"train, {epochs} epochs",
        lambda place: (
            *("train", "--set", "digits", "--epochs", epochs, "--batch", 16, "--device", "cpu"),
            *("--out", place / "runs"),
        ),
        result,
    )


def _get() -> Task:
    def result(place: Path) -> object:
        return sorted((path.name, path.read_bytes()) for path in (place / "set").iterdir() if path.name[0] != ".")

    return Task("data get", lambda place: ("data", "get", "small", "--data", place), result)


def _export() -> Task:
    def result(place: Path) -> object:
        models = read_models(place / "models" / "resnet20-bn-digits.safetensors")
        return (
            [_digest(value) for value in models[0].state_dict().values()],
            (place / "table.csv").read_text(encoding="utf-8"),
        )

    return Task(
        "export",
        lambda place: (
            *("export", place / "runs" / "digits-bn", "--models", place / "models", "--table", place / "table.csv"),
        ),
        result,
    )


MAKES = {family: [_make(family, seed) for seed in (0, 7)] for family in ("mnist-c", "cifar10-c", "imagenet-c")}
EVALUATE = _evaluate("uncorrected", "correct", "bn-mix")
TRAIN, GET, EXPORT = _train(), _get(), _export()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------- the trials


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
        """Do what a task needs first."""
        if task.name == EXPORT.name:
            (place / "runs" / "digits-bn").mkdir(parents=True, exist_ok=True)
            for file in self.trained.iterdir():
                shutil.copy(file, place / "runs" / "digits-bn")

    @functools.cached_property
    def trained(self) -> Path:
        with self.place() as place:
            ended = run(*TRAIN.command(place))
            assert ended.status == 0, ended.said
            shutil.copytree(place / "runs" / "digits-bn", self.scratch / "trained")
        return self.scratch / "trained"

    def reference(self, task: Task) -> tuple[object, float]:
        """Return the result of an undisturbed run, and the seconds that it takes."""
        if task.name not in self._references:
            with self.place() as place:
                self.ready(task, place)
                began = time.monotonic()
                ended = run(*task.command(place))
                assert ended.status == 0, f"{task.name}: {ended.said}"
                self._references[task.name] = task.result(place), time.monotonic() - began
        return self._references[task.name]

    def judge(self, task: Task, place: Path, ended: Ended, before: tuple[Ended, ...] = ()) -> str:
        """Return the kind of outcome after a command that ran to its end."""
        for each in (*before, ended):
            if each.status not in (0, 2, -signal.SIGKILL) or (each.status == 2 and not each.clear):
                return _noted("unexplained", task.name, each.said)
        if ended.status == 2:
            return "clear"
        try:
            right = task.result(place) == self.reference(task)[0]
        except Exception:
            return _noted("silent", task.name, traceback.format_exc())
        if not right:
            return _noted("silent", task.name, ended.said)
        return "clear" if any(each.status == 2 for each in before) else "survived"


def _noted(kind: str, name: str, said: str) -> str:
    print(f"  {kind}: {name}: {said[-1500:]}", file=sys.stderr)
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
    for task in (first, second):
        bench.reference(task)
    with bench.place() as place:
        bench.ready(first, place)
        pair = [Running(first.command(place)), Running(second.command(place))]
        ends = tuple(running.wait() for running in pair)
        outcomes = [bench.judge(task, place, run(*task.command(place)), ends) for task in (first, second)]
        return max(outcomes, key=KINDS.index)


def two_at_once_without_repair(bench: Bench, first: Task, second: Task) -> str:
    """Run two commands at the same time; what they leave must be right as it is."""
    for task in (first, second):
        bench.reference(task)
    with bench.place() as place:
        bench.ready(first, place)
        pair = [Running(first.command(place)), Running(second.command(place))]
        ends = tuple(running.wait() for running in pair)
        if all(each.status == 2 for each in ends):
            return _noted("unexplained", first.name, ends[0].said)
        done = [(task, each) for task, each in zip((first, second), ends, strict=True) if each.status != 2]
        outcomes = [bench.judge(task, place, each, ends) for task, each in done]
        return max(outcomes, key=KINDS.index)


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


# --------------------------------------------------------------------------------------------------- damaged files


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Return a file's content after something that disks, transfers and editors do to it."""
    at, size = chance.randrange(len(content)), chance.choice([1, 8, 64, 4096])
    kinds: list[Callable[[], bytes]] = [
        lambda: content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],  # a bit
        lambda: content[:at] + chance.randbytes(size) + content[at + size :],  # a block of something else
        lambda: content[:at] + bytes(len(content[at : at + size])) + content[at + size :],  # a block of zeros
        lambda: content[:at],  # cut short
        lambda: content[:at] + content[at + size :],  # a block is missing
        lambda: content[:at] + chance.randbytes(size) + content[at:],  # a block too many
        lambda: content + chance.randbytes(size),
        lambda: content[size:] + content[:size],
    ]
    # Most faults of the header are found by its JSON; half of the trials are single bits, which are found last.
    return kinds[0]() if chance.random() < 0.5 else chance.choice(kinds)()


@dataclass(frozen=True)
class Kept:
    """A kind of file: how one is written, and what it says, for comparison."""

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], object]


def damaged(kept: Kept, path: Path, content: bytes, chance: random.Random, wanted: object) -> str:
    """Damage a file, and read it."""
    path.write_bytes(mutate(content, chance))
    try:
        found = kept.read(path)
    except (ValueError, FileNotFoundError) as error:
        named = any(str(place) in str(error) for place in (path, path.parent, path.parents[1]))
        return "clear" if named else _noted("unexplained", kept.name, str(error))
    except Exception:
        return _noted("unexplained", kept.name, traceback.format_exc())
    return "survived" if found == wanted else _noted("silent", kept.name, "")


def _targets(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = zoo.load(MODEL)
        images = [torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))]
        chosen = trueup.calibrate(model, images, decide=False, resolution=33, select=lambda site: site.kind == kind)
        chosen.save(folder / "targets.safetensors")
        return folder / "targets.safetensors"

    return write


def _tensors(path: Path) -> object:
    with safe_open(str(path), "pt") as file:
        return {key: _digest(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def _read_targets(path: Path) -> object:
    trueup.Targets.load(path)
    return _tensors(path)


def _read_models(path: Path) -> object:
    return {s: [_digest(v) for v in model.state_dict().values()] for s, model in read_models(path).items()}


def _model_file(folder: Path) -> Path:
    from trueup_lab.models import Record, ResNet20, save_models
    from trueup_lab.models.weights import weights_of

    torch.manual_seed(0)
    record = Record("digits", "bn", channels=1, accuracy={0: 0.5})
    save_models(folder / "models.safetensors", {0: weights_of(ResNet20("bn", channels=1))}, record)
    return folder / "models.safetensors"


def _read_checkpoint(path: Path) -> object:
    from trueup_lab.training.run import load_run

    tensors, _ = load_checkpoint(path)
    load_run(path.parent)
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def kept_files(bench: Bench) -> list[Kept]:
    """The kinds of files that trueup writes and reads again."""

    def checkpoint(folder: Path) -> Path:
        for file in bench.trained.iterdir():
            shutil.copy(file, folder)
        return folder / "checkpoint.safetensors"

    def made(family: str, file: str) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            for entry in bench.root.iterdir():
                (folder / entry.name).symlink_to(entry)
            ended = run(*MAKES[family][0].command(folder))
            assert ended.status == 0, ended.said
            return folder / file

        return write

    def read(family: str, depth: int) -> Callable[[Path], object]:
        return lambda path: MAKES[family][0].result(path.parents[depth])

    return [
        Kept("targets of activations", _targets("activation"), _read_targets),
        Kept("targets of norms", _targets("norm"), _read_targets),
        Kept("model file", _model_file, _read_models),
        Kept("training checkpoint", checkpoint, _read_checkpoint),
        Kept("array of CIFAR-10-C", made("cifar10-c", "CIFAR-10-C/shot_noise.npy"), read("cifar10-c", 1)),
        Kept("manifest of CIFAR-10-C", made("cifar10-c", "CIFAR-10-C/trueup-manifest.json"), read("cifar10-c", 1)),
        Kept(
            "image of ImageNet-C",
            made("imagenet-c", "ImageNet-C/noise/shot_noise/3/n01440764/n01440764_0.JPEG"),
            read("imagenet-c", 5),
        ),
    ]


# ---------------------------------------------------------------------------------------------------- the programme


def serve(scratch: Path) -> int:
    """Serve a small set from a process of its own, and return that process's number."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for k in range(12):
            packed.writestr(f"set/{k}", bytes([k]) * 200_000)
    folder = scratch / "served"
    folder.mkdir()
    (folder / "set.zip").write_bytes(content.getvalue())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    remote = download.Remote(
        f"http://127.0.0.1:{server.server_port}/set.zip",
        hashlib.md5(content.getvalue(), usedforsecurity=False).hexdigest(),
        "set",
        ("set/0",),
    )
    download.REMOTES["small"] = (remote,)
    pid = os.fork()
    if not pid:
        server.serve_forever()
    server.server_close()
    return pid


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


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
        (MAKES["cifar10-c"][0], _make("cifar10-c", 0, "fog")),
        (EVALUATE, _evaluate("uncorrected", "bn-mix", seed=7)),
        (EVALUATE, _evaluate("uncorrected", corruption="stripe")),
        (TRAIN, _train(2)),
    ]
    for old, new in others:
        found["kill, then another", f"{old.name}; {new.name}"] = functools.partial(killed_then, bench, old, new)
    for task in (*(tasks[0] for tasks in MAKES.values()), EVALUATE, TRAIN, GET, EXPORT):
        found["two at once", task.name] = functools.partial(two_at_once_without_repair, bench, task, task)
    fog = _make("cifar10-c", 0, "fog")
    found["two at once", f"{MAKES['cifar10-c'][0].name}; {fog.name}"] = functools.partial(
        two_at_once_without_repair, bench, MAKES["cifar10-c"][0], fog
    )
    for old, new in MAKES.values():
        found["two at once", f"{old.name}; {new.name}"] = functools.partial(two_at_once, bench, old, new)
    found["two at once", "evaluate with two seeds"] = functools.partial(
        two_at_once_without_repair, bench, EVALUATE, _evaluate("uncorrected", "bn-mix", seed=7)
    )
    return found


def main(arguments: list[str] | None = None) -> list[FaultRow]:
    """Run the scenarios, print the table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="trials of each scenario with processes")
    parser.add_argument("--mutations", type=int, default=2000, help="damaged versions of each kind of file")
    parser.add_argument("--only", default="", help="only scenarios whose names match this regular expression")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of moments and places")
    parser.add_argument("--out", type=Path, help="CSV file of the table")
    options = parser.parse_args(arguments)
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
                rows.append(_row(fault, what, Counter(trial() for _ in range(options.rounds))))
        for kept in kept_files(bench):
            if re.search(options.only, f"damaged file: {kept.name}"):
                folder = Path(tempfile.mkdtemp(dir=scratch))
                path = kept.write(folder)
                content, wanted = path.read_bytes(), kept.read(path)
                count = Counter(damaged(kept, path, content, bench.chance, wanted) for _ in range(options.mutations))
                rows.append(_row("damaged file", kept.name, count))
    print(f"\nseed {options.seed}")
    print(table(rows))
    if options.out:
        write_table(options.out, FaultRow, rows)
    return rows


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
