"""`Monitor`: it counts what reports say, once, whatever the rule, the batches, the threads and the processes."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import re
import sys
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import trueup
from architectures import images, make
from trueup._reported import ImageReport
from trueup.monitor import P_EDGES, Snapshot
from trueup.monitor import monitor as monitors
from trueup.monitor.sealed import seal, unseal

RULES = {
    "nothing": trueup.Evidence(strength=0, base=0),
    "gated": trueup.Evidence(),
    "no gate": trueup.Evidence(budget=1, strength=0.1, base=0),
    "paper": trueup.Correction(lambda1=0.5, lambda2=0.5),
}


@pytest.fixture(scope="module")
def calibrated():
    model = make("mobilenet")
    return model, trueup.calibrate(model, images(400).split(100), decide=False)


def report(p, norms=1, gate=0.5, evidence=2.0):
    p = torch.tensor(p)
    return {"p": p, "gate": torch.full_like(p, gate), "evidence": torch.full((len(p), norms), evidence)}


def monitor_of(calibrated, **options):
    return trueup.Monitor(calibrated[1], **{"unusual": 0.02, **options})


def test_a_snapshot_counts_what_the_reports_said(calibrated):
    clock = iter([100.0, 160.0])
    monitor = monitor_of(calibrated, clock=lambda: next(clock))
    monitor.update(report([0.5, 0.01, 1.0]))
    monitor.update(report([0.0, 0.02], evidence=math.inf, gate=1.0), changed=[True, False])
    seen = monitor.snapshot()
    assert (seen.images, seen.unusual_images, seen.not_finite, seen.compared, seen.changed) == (5, 3, 1, 2, 1)
    assert (seen.began, seen.ended) == (100.0, 160.0)
    assert seen.gate == pytest.approx((3 * 0.5 + 2) / 5)
    assert list(seen.evidence.values()) == [2.0]
    assert seen.p_sum == pytest.approx(1.53)
    wanted = {0.005: 1, 0.01: 1, 0.02: 1, 0.5: 1, 1.0: 1}
    assert dict(zip(P_EDGES, seen.histogram, strict=True)) == dict.fromkeys(P_EDGES, 0) | wanted
    assert seen.unusual.value == pytest.approx(0.6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_p_is_the_same_whatever_the_rule_and_calibrated_on_clean_images(calibrated, rule):
    model, targets = calibrated
    x = images(400, seed=5)
    with torch.inference_mode():
        p = trueup.correct(model, targets, rule, report=True)(x)[1]["p"]
        untouched = trueup.correct(model, targets, RULES["nothing"], report=True)(x)[1]["p"]
    assert p.allclose(untouched)
    for level in (0.1, 0.5, 0.9):
        assert abs((p <= level).float().mean() - level) < 4 * math.sqrt(level * (1 - level) * (1 / 200 + 1 / 400))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drift_is_found_whatever_the_rule_and_clean_images_raise_no_alarm(calibrated, rule):
    model, targets = calibrated
    robust = trueup.correct(model, targets, rule, report=True)
    monitor = trueup.Monitor(robust, clock=iter(range(1000)).__next__)
    with torch.inference_mode():
        for batch in images(300, seed=6).split(30):
            monitor.update(robust(batch)[1])
        assert not monitor.snapshot().drifted
        noise = torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for batch in (images(60, seed=7) + 0.3 * noise).split(30):
            monitor.update(robust(batch)[1])
    seen = monitor.snapshot()
    assert seen.drifted
    assert 9 <= seen.since.timestamp() <= 11
    assert seen.unusual.value > 0.1
    assert seen.evidence["stem.1"] > 1.3


def test_batches_do_not_matter(calibrated):
    p = torch.rand(1300, generator=torch.Generator().manual_seed(0)).tolist()
    monitors = [monitor_of(calibrated, clock=lambda: 1.0) for _ in range(3)]
    for monitor, size in zip(monitors, (1, 100, 1300), strict=True):
        for k in range(0, 1300, size):
            monitor.update(report(p[k : k + size]))
    first, *others = (monitor.snapshot() for monitor in monitors)
    for seen in others:
        assert seen.log_e_value == pytest.approx(first.log_e_value)
        assert seen.histogram == first.histogram
        assert seen.gate_sum == pytest.approx(first.gate_sum)


def test_a_window_ends_and_the_drift_test_goes_on(calibrated):
    monitor = monitor_of(calibrated, clock=lambda: 7.0)
    monitor.update(report([0.005] * 6))
    first = monitor.reset()
    assert first.images == 6
    monitor.update(report([0.005] * 6))
    second = monitor.snapshot()
    assert second.images == 6
    assert first.streams.keys() == second.streams.keys()
    assert (first + second).images == 12
    (drift,) = (first + second).streams.values()
    assert drift.images == 12
    assert second.log_e_value > first.log_e_value
    monitor.reset(test=True)
    assert monitor.snapshot().log_e_value == 0
    assert not monitor.snapshot().drifted
    monitor.update(report([0.5]))
    assert monitor.snapshot().streams.keys() != second.streams.keys()


def test_the_alarm_stays_in_the_next_window(calibrated):
    monitor = monitor_of(calibrated)
    monitor.update(report([0.005] * 30))
    assert monitor.reset().drifted
    assert monitor.snapshot().drifted


def test_a_saved_monitor_goes_on(calibrated, tmp_path):
    whole, first = (monitor_of(calibrated, clock=lambda: 3.0) for _ in range(2))
    p = torch.rand(900, generator=torch.Generator().manual_seed(1)).tolist()
    whole.update(report(p))
    first.update(report(p[:333]))
    first.save(tmp_path / "monitor.json")
    again = trueup.Monitor.load(tmp_path / "monitor.json", clock=lambda: 3.0)
    again.update(report(p[333:]))
    (wanted,), (found,) = (m.snapshot().streams.values() for m in (whole, again))
    assert found.log_largest == pytest.approx(wanted.log_largest)
    assert again.snapshot().histogram == whole.snapshot().histogram
    assert again.snapshot().streams.keys() == first.snapshot().streams.keys()


def without_calibration(path):
    """Turn the file of a monitor into one as earlier versions wrote it."""
    state = unseal(path.read_text(), "trueup monitor", 1)
    window = unseal(state["window"], "trueup snapshot", 1)
    del window["calibration"]
    path.write_text(seal("trueup monitor", 1, state | {"window": seal("trueup snapshot", 1, window)}))


@pytest.mark.parametrize("earlier", [False, True], ids=["new file", "file of an earlier version"])
def test_a_saved_monitor_does_not_go_on_after_another_calibration(calibrated, tmp_path, earlier):
    """Its drift test ranks images among the held-out ones of the calibration that it began with."""
    model, targets = calibrated
    few = trueup.calibrate(model, [images(60)], decide=False)
    path = tmp_path / "monitor.json"
    monitor_of(calibrated).save(path)
    if earlier:
        without_calibration(path)
    sources = {"targets": few, "model": trueup.correct(model, few, RULES["nothing"], report=True)}
    for source in sources.values():
        with pytest.raises(ValueError, match="json: .* 200 held-out images .* held out 30, .*trueup.Monitor"):
            trueup.Monitor.load(path, source)
    again = trueup.Monitor.load(path, trueup.correct(model, targets, RULES["nothing"], report=True))
    monitor_of(calibrated).snapshot() + again.snapshot()
    with pytest.raises(ValueError, match="of two calibrations"):
        trueup.Monitor(few, unusual=0.04).snapshot() + replace(again.snapshot(), unusual_at=0.04)


def test_the_calibration_is_recognised_in_a_file_and_whatever_the_rule(calibrated, tmp_path):
    model, targets = calibrated
    targets.save(tmp_path / "t.trueup.safetensors")
    loaded = trueup.Targets.load(tmp_path / "t.trueup.safetensors")
    monitors = [trueup.Monitor(source, unusual=0.02) for source in (targets, loaded)]
    monitors += [trueup.Monitor(trueup.correct(model, loaded, r, report=True), unusual=0.02) for r in RULES.values()]
    assert len({monitor.snapshot().calibration for monitor in monitors}) == 1
    other = trueup.calibrate(model, images(400, seed=2).split(100), decide=False)
    assert trueup.Monitor(other).snapshot().calibration != monitors[0].snapshot().calibration


def test_a_saved_monitor_of_all_norms_does_not_go_on_with_a_report_of_one(calibrated, tmp_path):
    model, targets = calibrated
    trueup.Monitor(targets, report="all").save(tmp_path / "monitor.json")
    assert trueup.Monitor.load(tmp_path / "monitor.json", targets).norms == tuple(targets.norms)
    one = trueup.correct(model, targets, RULES["nothing"], report=True)
    with pytest.raises(ValueError, match="monitor.json: it reads .*give correct the same report="):
        trueup.Monitor.load(tmp_path / "monitor.json", one)


def test_a_file_that_is_no_monitor_is_refused(calibrated, tmp_path):
    Snapshot(("a",), 0.01).save(tmp_path / "x.json")
    with pytest.raises(ValueError, match="x.json: not a monitor"):
        trueup.Monitor.load(tmp_path / "x.json")
    monitor_of(calibrated).save(tmp_path / "monitor.json")
    for wrong in ("[" * 100_000, (tmp_path / "monitor.json").read_text().replace('"images": 0', '"images": 7', 1)):
        (tmp_path / "x.json").write_text(wrong)
        with pytest.raises(ValueError, match="x.json: not a monitor"):
            trueup.Monitor.load(tmp_path / "x.json")


def test_threads_lose_nothing(calibrated):
    monitor = monitor_of(calibrated)

    def work():
        for k in range(300):
            monitor.update(report([0.5, 0.01]))
            if k % 50 == 0:
                monitor.snapshot()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = monitor.snapshot()
    assert (seen.images, seen.unusual_images) == (3600, 1800)
    (drift,) = seen.streams.values()
    assert drift.images == 3600


def test_no_image_is_lost_between_two_windows(calibrated, monkeypatch):
    """Threads update while another resets, and every third update sends what has gathered."""
    monkeypatch.setattr(monitors, "FOLD_BATCHES", 3)
    monitor, windows, switch = monitor_of(calibrated), [], sys.getswitchinterval()

    def work():
        for _ in range(400):
            monitor.update(report([0.5]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            windows.append(monitor.reset())
    finally:
        sys.setswitchinterval(switch)
    assert sum((window.images for window in windows), monitor.snapshot().images) == 1600


def in_a_process(monitor, path):
    monitor.update(report([0.5] * 4))
    monitor.snapshot().save(path)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_copy_in_another_process_counts_only_what_it_sees(calibrated, tmp_path, start):
    monitor = monitor_of(calibrated)
    monitor.update(report([0.5] * 10))
    monitor.snapshot()
    process = multiprocessing.get_context(start).Process(target=in_a_process, args=(monitor, tmp_path / "a.json"))
    process.start()
    process.join()
    both = monitor.snapshot() + Snapshot.load(tmp_path / "a.json")
    assert both.images == 14
    assert len(both.streams) == 2


@pytest.mark.parametrize(
    "work",
    [trueup.Monitor.reset, trueup.Monitor.snapshot, lambda monitor: monitor.save(os.devnull), pickle.dumps],
    ids=["reset", "snapshot", "save", "pickle"],
)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_during_the_work_of_another_thread_can_be_used(calibrated, tmp_path, monkeypatch, work):
    """The thread holds the monitor's lock at that moment, and does not exist in the fork."""
    monitor, writing, forked = monitor_of(calibrated), threading.Event(), threading.Event()
    monkeypatch.setattr(monitors, "write_atomically", lambda *_: writing.set() or forked.wait())
    thread = threading.Thread(target=monitor.save, args=(tmp_path / "monitor.json",))
    thread.start()
    writing.wait()
    monkeypatch.setattr(monitors, "write_atomically", lambda *_: None)
    process = multiprocessing.get_context("fork").Process(target=work, args=(monitor,))
    process.start()
    process.join(20)
    forked.set()
    thread.join()
    process.kill()
    assert process.exitcode == 0


def warned_in_a_process(monitor, path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        monitor.update(report([0.5]))
        monitor.update(report([0.5]))
    path.write_text("\n".join(f"{warning.filename}: {warning.message}" for warning in said))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_says_that_it_writes_no_rows(calibrated, tmp_path):
    monitor = monitor_of(calibrated, rows=tmp_path / "rows.csv")
    process = multiprocessing.get_context("fork").Process(
        target=warned_in_a_process, args=(monitor, tmp_path / "said.txt")
    )
    process.start()
    process.join()
    (said,) = (tmp_path / "said.txt").read_text().splitlines()
    assert said.startswith(f"{__file__}: ")
    assert re.search("writes no rows to .*rows.csv.*give each process a file of its own", said)
    monitor.update(report([0.5, 0.5]))
    monitor.close()
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


def test_a_copy_says_that_it_writes_no_rows(calibrated, tmp_path):
    with monitor_of(calibrated, rows=tmp_path / "rows.csv") as monitor:
        for copied in (copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
            with pytest.warns(UserWarning, match="writes no rows to .*rows.csv"):
                again = copied(monitor)
            again.update(report([0.5]))
        assert again.snapshot().images == 1
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1


def test_the_farthest_images_count_as_unusual_however_few_were_held_out(calibrated):
    """Their p-value is 1 / (n + 1) up to float32's rounding, which lies above for some n. Small files hold n = 42."""
    _, targets = calibrated
    (name,) = list(targets.norms)[:1]
    for held in range(4, 99):
        few = replace(
            targets, norms={name: replace(targets.norms[name], sample=targets.norms[name].sample[: 2 * held])}
        )
        reporting = ImageReport(few, (name,), RULES["nothing"])
        assert reporting.clean_images == held
        monitor = trueup.Monitor(few, unusual=1 / (held + 1))
        monitor.update(reporting(torch.full((3, 5, len(few.norms[name].total.T)), 1e3)))
        assert monitor.snapshot().unusual_images == 3, held


def test_p_values_that_equal_an_edge_of_the_histogram_do_not_exceed_it(calibrated):
    monitor = monitor_of(calibrated)
    monitor.update(report(list(P_EDGES)))
    assert monitor.snapshot().histogram == (1,) * len(P_EDGES)


def test_every_p_value_is_counted_at_the_first_edge_that_it_does_not_exceed(calibrated):
    monitor = monitor_of(calibrated)
    p = [0.0, math.nan, *torch.rand(500, generator=torch.Generator().manual_seed(0)).tolist()]
    monitor.update(report(p))
    first = [next((k for k, edge in enumerate(P_EDGES) if value <= edge), len(P_EDGES) - 1) for value in p]
    assert monitor.snapshot().histogram == tuple(map(first.count, range(len(P_EDGES))))


def test_a_pickled_monitor_in_the_same_process_goes_on(calibrated):
    monitor = monitor_of(calibrated)
    monitor.update(report([0.5] * 10))
    again = pickle.loads(pickle.dumps(monitor))
    assert again.snapshot() == monitor.snapshot()
    assert os.getpid() == again._process


def test_loaded_and_copied_monitors_are_the_same_stream_until_they_are_made_fresh(calibrated, tmp_path):
    first = monitor_of(calibrated)
    first.update(report([0.5] * 10))
    first.save(tmp_path / "monitor.json")
    others = [trueup.Monitor.load(tmp_path / "monitor.json", calibrated[1]) for _ in range(2)]
    others += [copy.deepcopy(first)]
    assert {monitor.stream for monitor in others} == {first.stream} == set(first.snapshot().streams)
    for monitor in others:
        assert monitor.reset(test=True).images == 10
        monitor.update(report([0.5]))
    every = sum(monitor.snapshot() for monitor in (first, *others))
    assert every.images == 13
    assert set(every.streams) == {first.stream, *(monitor.stream for monitor in others)}
    assert len(every.streams) == 4


def test_arrays_of_an_exported_model_will_do_and_are_copied(calibrated):
    monitor = monitor_of(calibrated)
    arrays = {key: value.numpy() for key, value in report([0.5, 0.01]).items()}
    monitor.update(arrays)
    arrays["p"][:] = 0.01
    assert monitor.snapshot().unusual_images == 1


def test_memory_does_not_grow_with_the_images(calibrated):
    monitor = monitor_of(calibrated)
    sizes = []
    for _ in range(3):
        for _ in range(20):
            monitor.update(report(np.random.default_rng(0).uniform(size=200).tolist()))
        sizes.append(len(pickle.dumps(monitor)))
    assert max(sizes) - min(sizes) < 100  # digits of larger counts


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(3), TypeError, "expected the report that a corrected model returns"),
        ({"p": torch.zeros(2)}, TypeError, "with 'p', 'gate' and 'evidence'"),
        (report([0.5], norms=7), ValueError, r"evidence \(images, 1\)"),
    ],
)
def test_something_else_than_a_report_is_refused(calibrated, given, error, message):
    with pytest.raises(error, match=message):
        monitor_of(calibrated).update(given)


def test_flags_must_fit_the_images(calibrated):
    with pytest.raises(ValueError, match="got 1 images, but changed= has 2 entries"):
        monitor_of(calibrated).update(report([0.5]), changed=[True, False])


def test_it_needs_a_model_with_a_report(calibrated):
    with pytest.raises(TypeError, match="report=True.* got a Corrected without a report"):
        trueup.Monitor(trueup.correct(*calibrated, trueup.Evidence()))
    with pytest.raises(TypeError, match="got a MobileNet"):
        trueup.Monitor(calibrated[0])


def test_levels_that_cannot_work_are_refused(calibrated):
    with pytest.raises(ValueError, match="false_alarm=0"):
        monitor_of(calibrated, false_alarm=0)
    with pytest.raises(ValueError, match="200 held-out images the smallest p-value is 0.00498"):
        monitor_of(calibrated, unusual=0.001)


def test_targets_alone_will_do_for_a_report_of_all_norms(calibrated):
    model, targets = calibrated
    robust = trueup.correct(model, targets, trueup.Evidence(), report="all")
    monitor = trueup.Monitor(targets, report="all")
    monitor.update(robust(images(3))[1])
    assert monitor.norms == robust.report.norms == tuple(targets.norms)
    assert monitor.snapshot().images == 3


def test_many_updates_are_counted_in_their_order_with_the_answers_that_were_compared(calibrated, tmp_path):
    """More images than are kept at once, and only every third batch compared."""
    monitor = monitor_of(calibrated, rows=tmp_path / "rows.csv", clock=iter(range(10_000)).__next__)
    generator, wanted, flags = torch.Generator().manual_seed(0), [], []
    for k in range(70):
        p = torch.rand(100, generator=generator).clamp(min=0.05)
        changed = p > 0.5 if k % 3 == 0 else None
        monitor.update({"p": p, "gate": p, "evidence": p[:, None]}, changed=changed)
        wanted.append(p)
        flags += [""] * 100 if changed is None else [f"{float(flag):g}" for flag in changed]
    monitor.close()
    p = torch.cat(wanted)
    lines = [line.split(",") for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]]
    assert [float(line[1]) for line in lines] == pytest.approx(p.tolist(), rel=1e-5)
    assert [line[3] for line in lines] == flags
    seen = monitor.snapshot()
    assert (seen.images, seen.compared, seen.changed) == (7000, 2400, flags.count("1"))


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_gpu_update_waits_for_nothing_and_the_reports_are_those_of_the_cpu(calibrated):
    robust = trueup.correct(*calibrated, RULES["gated"], report="all")
    there = copy.deepcopy(robust).to("cuda")
    here, far = (trueup.Monitor(robust, unusual=0.02, clock=lambda: 0.0) for _ in range(2))
    x = torch.cat([images(100, seed=4), 2 * images(100, seed=5)])
    with torch.backends.cudnn.flags(allow_tf32=False):
        wanted, found = robust(x)[1], there(x.cuda())[1]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=2e-3, atol=2e-3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(25):
            far.update(found, changed=found["p"] < 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(25):
        here.update({name: value.cpu() for name, value in found.items()}, changed=found["p"].cpu() < 0.5)
    one, other = here.snapshot(), far.snapshot()
    assert (one.images, one.histogram, one.changed) == (other.images, other.histogram, other.changed)
    assert one.evidence == other.evidence


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_gpu_each_thread_may_have_a_stream_of_its_own(calibrated):
    """Another thread counts what this one's stream has not computed yet."""
    monitor = monitor_of(calibrated)
    p = torch.ones(64, device="cuda")
    late = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        torch.cuda._sleep(200_000_000)
        p.fill_(0.01)
        rest = {"gate": torch.full_like(p, 0.5), "evidence": torch.full((64, 1), 2.0, device="cuda")}
        monitor.update({"p": p, **rest})
    assert monitor.snapshot().unusual_images == 64
