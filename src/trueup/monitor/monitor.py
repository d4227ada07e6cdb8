"""`Monitor`: watches the images that a corrected model answers."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup._correct import Corrected
from trueup._reported import ImageReport, Reported, reading_norms
from trueup.atomic import write_atomically
from trueup.monitor.drift import DriftTest, Floats, gaps_of
from trueup.monitor.rows import ImageRow, RowWriter, open_rows
from trueup.monitor.sealed import seal, unseal
from trueup.monitor.snapshot import EVIDENCE_CAP, P_EDGES, Drift, Snapshot
from trueup.plurals import counted
from trueup.rules import Evidence
from trueup.targets import Targets

FORMAT, VERSION = "trueup monitor", 1
# Images, or batches, that wait on the device. They are copied to the host together, which is cheaper.
FOLD = 2048
FOLD_BATCHES = 512
_INNER_EDGES = np.array(P_EDGES[:-1])[:, None]
ROUNDING = 2e-6  # share of itself by which a p-value, computed in float32, may exceed the level that it equals


class Monitor:
    """Watch the images that a corrected model answers: how unusual they are, and whether they have drifted.

        robust = trueup.correct(model, targets, report=True)
        monitor = trueup.Monitor(robust)
        logits, report = robust(images)
        monitor.update(report)
        print(monitor.snapshot())

    It reads the report that the forward pass already returned; no second pass is run. `update` only keeps a few numbers
    per image, on their device. When there are many, it starts to copy them and counts those that it copied before: it
    never waits for a GPU. `snapshot` waits until all images are counted.

    source: a module that `trueup.correct(..., report=True)` made; or targets, for a model that was exported.
    unusual: p-value up to which an image counts as unusual; about this share of clean images does.
    false_alarm: bound on the probability that the drift test ever raises an alarm on clean images, however long it runs
        and however often one looks. It holds if the images that calibration held out and those that are seen are
        exchangeable, as independent images of one kind are; frames of one film are not. docs/monitoring.md says more.
    report: what was given to `correct`, if `source` is targets: True or "all".
    rows: path of a .csv or .parquet file that gets one row per image; call `close` at the end. A copy, by fork or
        pickle, writes no rows and warns: in each worker, make a monitor with a file of its own.
    clock: a function that returns the time in seconds since 1970.

    Threads may share a monitor. Each process needs its own: a copy in another process, by fork or pickle, begins empty,
    so that the sum of all snapshots counts every image once. A copy in the same process, and a monitor that `load`
    returns, go on in place of the original, with its window and its stream: let only one of them go on. After
    `reset(test=True)`, each is a fresh monitor with a stream of its own.
    """

    def __init__(
        self,
        source: Corrected | Targets,
        *,
        unusual: float = 0.01,
        false_alarm: float = 0.001,
        report: Reported = True,
        rows: str | PathLike[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("unusual", unusual), ("false_alarm", false_alarm)):
            if not 0 < value < 1:
                raise ValueError(f"Monitor({name}={value!r}): expected a probability between 0 and 1")
        reporting = _report_module(source, report)
        self.norms, self.clean_images, self.unusual = reporting.norms, reporting.clean_images, unusual
        self._calibration = reporting.calibration
        if 1 / (self.clean_images + 1) > unusual:
            raise ValueError(
                f"Monitor(unusual={unusual!r}): with {self.clean_images} held-out images the smallest p-value is "
                f"{1 / (self.clean_images + 1):.3g}, so no image could count as unusual; calibrate on more images, or "
                "raise unusual="
            )
        self._locks = {}
        self._clock = clock
        self._open_rows(rows)
        self._begin(DriftTest(self.clean_images, false_alarm=false_alarm))

    # One lock per process. A thread of the parent may have held the parent's at the moment of a fork, and nobody would
    # ever release the fork's copy of that.
    _locks: dict[int, threading.RLock]

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _open_rows(self, path: str | PathLike[str] | None) -> None:
        self._rows_path = None if path is None else os.fspath(path)
        self._rows: RowWriter | None = None if path is None else open_rows(path, self.norms)

    def _begin(self, test: DriftTest) -> None:
        """Start an empty window and a new stream for this process."""
        self._process, self._stream = os.getpid(), uuid.uuid4().hex
        self._test = test
        self._window = Snapshot(self.norms, self.unusual, calibration=self._calibration)
        self._pending: list[_Batch] = []
        self._waiting = 0
        self._transfer: _Transfer | None = None

    def update(self, report: Mapping[str, Any], *, changed: Any = None) -> None:
        """Take in the report of one forward pass: tensors, or the arrays that an exported model returned.

        changed: for each image, whether its answer differs from the uncorrected model's, if you know.
        """
        batch = _Batch(self._clock(), _columns(report, len(self.norms)), None if changed is None else _flags(changed))
        if batch.changed is not None and len(batch.changed) != len(batch.values):
            raise ValueError(f"update: got {len(batch.values)} images, but changed= has {len(batch.changed)} entries")
        with self._lock:
            self._check_process()
            self._pending.append(batch)
            self._waiting += len(batch.values)
            if self._waiting >= FOLD or len(self._pending) >= FOLD_BATCHES:
                self._send()

    @property
    def stream(self) -> str:
        """Identifier of the stream of images that the drift test watches: unique, also among processes and machines."""
        with self._lock:
            self._check_process()
            return self._stream

    def snapshot(self) -> Snapshot:
        """Counts and sums since the last `reset`, and the state of the drift test since it began."""
        with self._lock:
            self._check_process()
            self._fold()
            return self._window

    def reset(self, *, test: bool = False) -> Snapshot:
        """Begin a new window, and return the one that ends. The drift test goes on, unless `test` starts it anew."""
        with self._lock:
            self._check_process()
            ended = self.snapshot()
            stream, old = self._stream, self._test
            self._begin(DriftTest(self.clean_images, false_alarm=old.false_alarm) if test else old)
            if not test:
                self._stream = stream
                self._window = replace(self._window, streams=ended.streams)
            return ended

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a JSON file, so that `load` can go on in this or another process."""
        with self._lock:
            self._check_process()
            state = {"window": self.snapshot().to_json(), "stream": self._stream, "test": self._test.state()}
            write_atomically(Path(path), seal(FORMAT, VERSION, state).encode())

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        source: Corrected | Targets | None = None,
        *,
        rows: str | PathLike[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Monitor:
        """Go on where the monitor that was saved stopped, with its window and its stream. One process may do so.

        source: the corrected model, or its targets, whose reports will follow. Raises ValueError if their calibration
            is another one than the monitor's: the drift test cannot go on then. Without it, nothing is checked.
        """
        monitor = cls.__new__(cls)
        try:
            state = unseal(Path(path).read_text(encoding="utf-8"), FORMAT, VERSION)
            test, window = DriftTest.from_state(state["test"]), Snapshot.from_json(state["window"])
            stream = state["stream"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a monitor that Monitor.save wrote: {error}") from error
        if source is not None:
            reporting = _report_module(source, "all" if len(window.norms) > 1 else True)
            if fault := _fault(reporting, window, test.clean):
                raise ValueError(f"{path}: {fault}")
            window = replace(window, calibration=reporting.calibration)
        monitor._calibration = window.calibration
        monitor.norms, monitor.clean_images, monitor.unusual = window.norms, test.clean, window.unusual_at
        monitor._locks, monitor._clock = {}, clock
        monitor._open_rows(rows)
        monitor._begin(test)
        monitor._stream, monitor._window = stream, window
        return monitor

    def close(self) -> None:
        """Count what is waiting, and finish the file of rows."""
        self.snapshot()
        if self._rows is not None:
            self._rows.close()
            self._rows = self._rows_path = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Monitor({counted(len(self.norms), 'norm')}, {counted(self.clean_images, 'held-out image')})"

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._check_process()
            self._fold()
            return {key: value for key, value in self.__dict__.items() if key not in ("_locks", "_rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _locks={})
        self._stop_rows()

    def _check_process(self) -> None:
        """Begin anew in a process that got a copy: what the copy has seen belongs to the process that saw it."""
        if os.getpid() != self._process:
            self._begin(DriftTest(self.clean_images, false_alarm=self._test.false_alarm))
            self._stop_rows()

    def _stop_rows(self) -> None:
        """Write no more rows, because this is a copy: two writers would garble the file."""
        path, self._rows, self._rows_path = self._rows_path, None, None
        if path is not None:
            warnings.warn(
                f"Monitor: this copy writes no rows to {path}, which belongs to the monitor that it was copied from; "
                "give each process a file of its own: trueup.Monitor(robust, rows=...) in that process",
                stacklevel=4,
            )

    def _fold(self) -> None:
        """Count all images that are waiting."""
        self._send()
        self._send()

    def _send(self) -> None:
        """Start to copy pending batches to the host's memory, and count those that were sent before."""
        arrived, self._transfer = self._transfer, _Transfer.of(self._pending) if self._pending else None
        self._pending, self._waiting = [], 0
        if arrived is not None:
            self._count(*arrived.wait())

    def _count(self, batches: Sequence[_Batch], values: Floats, changed: Floats) -> None:
        """Count the images of these batches, given their `values` `(images, 2 + norms)` and `changed` answers."""
        if not len(values):
            return
        p, gate, evidence = values[:, 0], values[:, 1], values[:, 2:]
        times = np.repeat([batch.time for batch in batches], [batch.images for batch in batches])
        self._test.step(gaps_of(p, self.clean_images), times)
        known = np.isfinite(evidence)
        capped = np.where(known, np.minimum(evidence, EVIDENCE_CAP), 0.0)
        at = p * (1 - ROUNDING)  # to compare with levels
        # Counts up to each edge. Comparing all images with all edges is faster than to search the place of each.
        up_to = [0, *np.count_nonzero(at <= _INNER_EDGES, axis=1).tolist(), len(p)]
        drift = Drift(
            self._test.images,
            self._test.log_e,
            self._test.log_largest,
            self._test.false_alarm,
            self._test.alarm,
        )
        seen = Snapshot(
            norms=self.norms,
            unusual_at=self.unusual,
            images=len(p),
            not_finite=int((p == 0).sum()),
            unusual_images=int((at <= self.unusual).sum()),
            histogram=tuple(b - a for a, b in pairwise(up_to)),
            p_sum=float(p.sum()),
            gate_sum=float(gate.sum()),
            evidence_sum=tuple(capped.sum(axis=0).tolist()),
            evidence_images=tuple(known.sum(axis=0).tolist()),
            compared=len(changed),
            changed=int(changed.sum()),
            began=float(times[0]),
            ended=float(times[-1]),
            streams={self._stream: drift},
        )
        self._window = self._window + seen
        if self._rows is not None:
            self._rows.write(_image_rows(batches, values, changed))


class _Batch:
    """Record of a forward pass: time, `(images, 2 + norms)` of p, gate and evidence, and the changed answers."""

    __slots__ = ("changed", "images", "stream", "time", "values")

    def __init__(self, when: float, values: Tensor, changed: Tensor | None) -> None:
        self.time, self.images, self.values, self.changed = when, len(values), values, changed
        self.stream = torch.cuda.current_stream(values.device) if values.is_cuda else None  # that computes them

    def join(self) -> None:
        """Let the current stream wait for the numbers, if another one computes them: each thread may have its own."""
        if self.stream is None or (here := torch.cuda.current_stream(self.stream.device)) == self.stream:
            return
        here.wait_stream(self.stream)
        for numbers in (self.values, self.changed):
            if numbers is not None and numbers.is_cuda:
                numbers.record_stream(here)


class _Transfer(NamedTuple):
    """Batches whose numbers are being copied to the host's memory."""

    batches: Sequence[_Batch]
    values: Tensor
    changed: Tensor  # answers that changed, of the batches that say so
    done: Sequence[torch.cuda.Event]

    @staticmethod
    def of(batches: Sequence[_Batch]) -> _Transfer:
        """Start to copy these batches."""
        for batch in batches:
            batch.join()
        changed = [batch.changed for batch in batches if batch.changed is not None]
        done: list[torch.cuda.Event] = []
        values, flags = (_to_host(parts, done) for parts in ([batch.values for batch in batches], changed))
        return _Transfer(batches, values, flags, done)

    def wait(self) -> tuple[Sequence[_Batch], Floats, Floats]:
        """Wait for the copy, and return the batches and their numbers."""
        for event in self.done:
            event.synchronize()
        return self.batches, self.values.double().numpy(), self.changed.double().numpy()


def _to_host(parts: Sequence[Tensor], done: list[torch.cuda.Event]) -> Tensor:
    """Start to copy the parts to one tensor in the host's memory. It is ready when the events in `done` are."""
    if not parts:
        return torch.zeros(0, device="cpu")
    together = torch.cat(list(parts) if len({part.device for part in parts}) == 1 else [part.cpu() for part in parts])
    if not together.is_cuda:
        return together.cpu()
    # Pinned memory: a copy to any other makes the host wait.
    host = torch.empty_like(together, device="cpu", pin_memory=True).copy_(together, non_blocking=True)
    done.append(torch.cuda.current_stream(together.device).record_event())
    return host


def _report_module(source: Corrected | Targets, report: Reported) -> ImageReport:
    if isinstance(source, Targets):
        return ImageReport(source, reading_norms(source, list(source.norms), report or True), Evidence())
    found = getattr(source, "_report", None)
    if not isinstance(found, ImageReport):
        raise TypeError(
            f"Monitor: expected a module made by trueup.correct(model, targets, report=True), or targets; got a "
            f"{type(source).__name__}{' without a report' if isinstance(source, Corrected) else ''}"
        )
    return found


def _fault(reporting: ImageReport, window: Snapshot, clean: int) -> str | None:
    """Describe why a saved monitor cannot watch the model that makes these reports; None if it can."""
    if window.calibration not in ("", reporting.calibration) or reporting.clean_images != clean:
        return (
            f"its images were ranked among the {counted(clean, 'held-out image')} of another calibration "
            f"than the given one, which held out {reporting.clean_images}, so its drift test cannot go on; keep this "
            "file with the old targets, and begin another one with trueup.Monitor(robust)"
        )
    if reporting.norms != window.norms:
        return f"it reads {window.norms}, but the given model reports {reporting.norms}; give correct the same report="
    return None


def _columns(report: Mapping[str, Any], norms: int) -> Tensor:
    """p, gate and evidence side by side. A copy, because a model may reuse the memory that it returns."""
    try:
        p, gate, evidence = (_tensor(report[name]) for name in ("p", "gate", "evidence"))
    except (KeyError, TypeError, IndexError) as error:
        raise TypeError(
            "update: expected the report that a corrected model returns beside its output, a dictionary with 'p', "
            f"'gate' and 'evidence'; got {type(report).__name__} ({error!r})"
        ) from error
    if evidence.dim() != 2 or evidence.shape[1] != norms or p.shape != gate.shape or p.shape != evidence.shape[:1]:
        raise ValueError(
            f"update: expected p and gate (images,) and evidence (images, {norms}), got {tuple(p.shape)}, "
            f"{tuple(gate.shape)} and {tuple(evidence.shape)}; is the report of this model?"
        )
    return torch.cat([p[:, None], gate[:, None], evidence], dim=1)


def _flags(changed: Any) -> Tensor:
    return _tensor(changed).bool().flatten().clone()


def _tensor(value: Any) -> Tensor:
    """A tensor where it is, or anything like an array on the CPU, whatever torch's default device is."""
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _image_rows(batches: Sequence[_Batch], values: Floats, changed: Floats) -> list[ImageRow]:
    rows = []
    numbers, flags = iter(values.tolist()), iter(changed.astype(bool).tolist())
    for batch in batches:
        for _ in range(batch.images):
            p, gate, *evidence = next(numbers)
            flag = None if batch.changed is None else next(flags)
            rows.append(ImageRow(batch.time, p, gate, flag, [x if math.isfinite(x) else None for x in evidence]))
    return rows
