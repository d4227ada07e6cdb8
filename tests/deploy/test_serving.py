"""Serving on a CPU: places where nothing can be written, without compilers, with threads, forked, for long."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import trueup
from architectures import images, make
from trueup import functional

TESTS = Path(__file__).parents[1]
ANSWER = f"""
import sys, torch
sys.path.insert(0, {str(TESTS)!r})
import trueup
from architectures import images, make
model = make("compact")
targets = trueup.calibrate(model, [images(24)], decide=False)
with torch.inference_mode():
    for rule in (trueup.Evidence(), trueup.Correction(method="histogram")):
        print(trueup.correct(model, targets, rule)(images(3, seed=4)).double().sum().item())
"""


def answers(code=ANSWER, **environment):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [float(line) for line in found.stdout.split()], found.stderr


@pytest.fixture(scope="module")
def usual():
    return answers()[0]


def test_a_place_where_numba_can_keep_nothing():
    """As in a read-only container without a home: numba finds no folder that it can write to."""
    code = """
import numba.core.caching as c
c.CacheImpl._locator_classes = []
import torch
from trueup import kernels
print(*kernels.moments(torch.arange(192.0).reshape(1, 3, 8, 8), bands=True).flatten().tolist())
"""
    found, _ = answers(code)
    wanted = functional.evidence.moments(torch.arange(192.0).reshape(1, 3, 8, 8), bands=True)
    torch.testing.assert_close(torch.tensor(found).reshape(1, 5, 3), wanted)


READ_ONLY = """
from numba.core import caching, event
def refuse(self):
    raise PermissionError("read-only file system")
caching._CacheLocator.ensure_cache_path = refuse
{change}
with event.install_recorder("numba:compile") as recorder:
"""
COUNT = "\n    print(len(recorder.buffer))"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder in which numba has saved all that a corrected model needs."""
    folder = tmp_path_factory.mktemp("numba")
    answers(NUMBA_CACHE_DIR=str(folder))
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_code_that_was_compiled_before_is_loaded_where_nothing_can_be_written(usual, filled):
    """As in a read-only container whose image was built with a filled cache. Root may write where it is not allowed."""
    before = contents(filled)
    code = READ_ONLY.format(change="") + textwrap.indent(ANSWER, "    ") + COUNT
    found, _ = answers(code, NUMBA_CACHE_DIR=str(filled))
    assert found == [*usual, 0]
    assert contents(filled) == before


@pytest.mark.parametrize("change", ["damaged", "caching.CompileResultCacheImpl = None"], ids=["damaged", "other numba"])
def test_a_cache_that_cannot_be_loaded_does_not_matter(change, usual, filled, tmp_path):
    folder = tmp_path / "numba"
    shutil.copytree(filled, folder)
    if change == "damaged":
        change = ""
        for path in folder.rglob("*.nbi"):
            path.write_bytes(path.read_bytes()[:40])
    code = READ_ONLY.format(change=change) + textwrap.indent(ANSWER, "    ") + COUNT
    found, _ = answers(code, NUMBA_CACHE_DIR=str(folder))
    assert found[:-1] == usual


def test_a_cache_that_names_what_an_update_removed_is_replaced(usual, filled, tmp_path):
    folder = tmp_path / "numba"
    shutil.copytree(filled, folder)
    for path in sorted(folder.rglob("gate*.nbi")):
        version = pickle.dumps(pickle.loads(path.read_bytes()), -1)  # the rest is behind it
        path.write_bytes(version + b"ctrueup.kernels.cpu.gone\nRule\n.")
    assert answers(NUMBA_CACHE_DIR=str(folder))[0] == usual
    assert not any(b"trueup.kernels.cpu.gone" in content for content in contents(folder).values())


def test_without_numba(usual):
    found, _ = answers("import sys; sys.modules['numba'] = None\n" + ANSWER)
    assert found == pytest.approx(usual, abs=1e-2)


def test_with_a_numba_that_does_not_work(usual, tmp_path):
    (tmp_path / "numba.py").write_text("raise OSError('no LLVM here')")
    found, said = answers(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert found == pytest.approx(usual, abs=1e-2)
    assert "numba does not work here (OSError: no LLVM here)" in said


def corrected(rule=None):
    model = make("resnet")
    return trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), rule or trueup.Evidence())


def test_threads_that_share_a_corrected_model_get_their_own_answers():
    robust, x = corrected(), images(8, seed=4)
    with torch.inference_mode():
        wanted = [robust(image[None]) for image in x]
    found = [[] for _ in x]

    def serve(k):
        with torch.inference_mode():
            found[k].extend(robust(x[k : k + 1]) for _ in range(10))

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answers_of_thread, answer in zip(found, wanted, strict=True):
        assert len(answers_of_thread) == 10
        assert all(each.equal(answer) for each in answers_of_thread)


def test_compiled_code_runs_without_pythons_lock(monkeypatch):
    """One site on many values takes long; meanwhile another thread of Python runs on."""
    from trueup.kernels.cpu import maps

    robust = corrected(trueup.Evidence(budget=1))
    large, ticks, done = torch.randn(64, 8, 256, 256), [], threading.Event()
    inside = threading.Event()
    run = maps.run_native

    def watched(*arguments):
        inside.set()
        run(*arguments)
        inside.clear()

    monkeypatch.setattr(maps, "run_native", watched)

    def tick():
        while not done.is_set():
            if inside.is_set():
                ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    with torch.inference_mode():
        robust.placed[0](large)
    done.set()
    thread.join()
    assert len(ticks) > 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_answers_after_its_parent_has():
    robust, x = corrected(), images(4, seed=4)
    with torch.inference_mode():
        wanted = robust(x)
    read, write = os.pipe()
    if not (child := os.fork()):
        with torch.inference_mode():
            os.write(write, b"y" if robust(x).equal(wanted) else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"


def test_correcting_compiles_what_the_first_answer_needs():
    code = (
        ANSWER.rpartition("with torch")[0]
        + """
from numba.core import event
robust = trueup.correct(model, targets, trueup.Evidence())
with event.install_recorder("numba:compile") as recorder, torch.inference_mode():
    robust(images(3, seed=4))
print(len(recorder.buffer))
"""
    )
    assert answers(code)[0] == [0.0]


def test_memory_stays_flat_over_calls():
    robust, x = corrected(), images(1)
    with torch.inference_mode():
        for _ in range(50):
            robust(x)
        before = _resident()
        for _ in range(1500):
            robust(x)
        assert _resident() - before < 2_000_000  # 1.3 kB per call would show


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
