"""The commands that benchmarks/faults.py disturbs: how to run each in its own process, and how to read its result."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import json
import os
import pickle
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from trueup.cli import application
from trueup_lab.cli import add_commands
from trueup_lab.data import download
from trueup_lab.data.corrupted_sets import imagenet_c, load
from trueup_lab.evaluation import read_rows
from trueup_lab.models import read_models
from trueup_lab.training.checkpoint import load_checkpoint

MODEL = "resnet20-bn-digits"
LONGEST = 120.0  # seconds after which a command counts as stuck; the slowest takes about 10
STUCK = 72  # status of such a command


@dataclass(frozen=True)
class Ended:
    """The end of a command. `status` is negative if a signal ended it."""

    status: int
    output: str

    @property
    def clear(self) -> bool:
        """Whether the command refused with one line that says what is wrong."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return self.status == 2 and len(lines) == 1 and "Traceback" not in self.output


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
        """Wait for the end. A command that takes longer than `LONGEST` is stuck: it is killed, and says so."""
        limit = time.monotonic() + LONGEST
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                self.kill()
                os.waitpid(self._pid, 0)
                return Ended(STUCK, f"no end after {LONGEST:g} s")
            time.sleep(0.005)
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        self._log.close()
        return Ended(os.waitstatus_to_exitcode(ended[1]), output)


def run(*arguments: object) -> Ended:
    """Run a command to its end."""
    return Running(arguments).wait()


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


def make_task(family: str, seed: int, only: str = "shot_noise") -> Task:
    severities = ("--severity", 3) if family == "imagenet-c" else ()

    def result(place: Path) -> object:
        if family == "imagenet-c":
            data = imagenet_c(only, 3, root=place, seed=seed)
            assert data.seed is None, "not read from the folder"
            return digest(torch.stack([data[k][0] for k in range(len(data))]))
        found = load(family, only, None if family == "mnist-c" else 3, root=place, seed=seed)
        top = place / {"mnist-c": "MNIST-C", "cifar10-c": "CIFAR-10-C"}[family]
        assert any(top.rglob("*.npy")), "not made"
        return digest(found.images), digest(found.labels), found.origin

    return Task(
        f"data make {family}, seed {seed}" + ("" if only == "shot_noise" else f", {only}"),
        lambda place: ("data", "make", family, "--only", only, *severities, "--seed", seed, "--data", place),
        result,
    )


def evaluate_task(*methods: str, seed: int = 0, corruption: str = "shot_noise") -> Task:
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


def train_task(epochs: int = 4) -> Task:
    def result(place: Path) -> object:
        tensors, facts = load_checkpoint(place / "runs" / "digits-bn" / "checkpoint.safetensors")
        record = json.loads((place / "runs" / "digits-bn" / "record.json").read_text(encoding="utf-8"))
        weights = {name: digest(tensor) for name, tensor in sorted(tensors.items())}
        return weights, facts["epoch"], record["test_accuracy"]

    return Task(
        f"train, {epochs} epochs",
        lambda place: (
            *("train", "--set", "digits", "--epochs", epochs, "--batch", 16, "--device", "cpu"),
            *("--out", place / "runs"),
        ),
        result,
    )


def get_task() -> Task:
    def result(place: Path) -> object:
        return sorted((path.name, path.read_bytes()) for path in (place / "set").iterdir() if path.name[0] != ".")

    return Task("data get", lambda place: ("data", "get", "small", "--data", place), result)


def export_task() -> Task:
    def result(place: Path) -> object:
        models = read_models(place / "models" / "resnet20-bn-digits.safetensors")
        return (
            [digest(value) for value in models[0].state_dict().values()],
            (place / "table.csv").read_text(encoding="utf-8"),
        )

    return Task(
        "export",
        lambda place: (
            *("export", place / "runs" / "digits-bn", "--models", place / "models", "--table", place / "table.csv"),
        ),
        result,
    )


MAKES = {family: [make_task(family, seed) for seed in (0, 7)] for family in ("mnist-c", "cifar10-c", "imagenet-c")}
EVALUATE = evaluate_task("uncorrected", "correct", "bn-mix")
TRAIN, GET, EXPORT = train_task(), get_task(), export_task()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


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
