"""Locks between processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trueup_lab.locks import BusyError, locked

HOLD = "import sys; from trueup_lab.locks import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"


def hold(path):
    """Start a process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_of_another_process_is_respected_and_ends_with_it(tmp_path):
    path = tmp_path / "new" / "file"
    other = hold(path)
    with other:
        with pytest.raises(BusyError, match="another process is writing .*file; wait"), locked(path, wait=False):
            pass
        told = []
        with locked(path, waiting=lambda: told.append(other.kill())):  # kill -9
            assert other.wait() != 0
            assert len(told) == 1
    assert list(path.parent.iterdir()) == []


def test_a_lock_is_free_again_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), locked(tmp_path / "file", wait=False):
            raise KeyError


def test_the_lock_that_was_removed_meanwhile_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """A process that opened the file just before its holder removed it must open the new one."""
    import os

    path, opened = tmp_path / "file", os.open

    def racing(where, *options):
        descriptor = opened(where, *options)
        monkeypatch.undo()
        os.unlink(where)
        return descriptor

    monkeypatch.setattr("os.open", racing)
    with locked(path):
        assert (tmp_path / ".file.lock").exists()
