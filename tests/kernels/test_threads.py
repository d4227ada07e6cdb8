"""Sharing out work: all of it is done, once, whoever does it; and failures are not lost."""

from __future__ import annotations

import pytest

from trueup.kernels import threads


@pytest.fixture(params=["torch's threads", "Python's threads"], autouse=True)
def whose(request, monkeypatch):
    if request.param == "Python's threads":
        monkeypatch.setattr(threads, "_torch_openmp", lambda: None)
    elif threads._torch_openmp() is None:
        pytest.skip("torch did not come with GNU's OpenMP")


@pytest.mark.parametrize("shares", [1, 2, 3, 50])  # more than there are cores, too
def test_every_share_is_done_once(shares):
    done = []
    threads.run_parallel(done.append, shares)
    assert sorted(done) == list(range(shares))


def test_what_one_of_them_raises_is_raised():
    def work(k):
        if k == 1:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        threads.run_parallel(work, 2)
    threads.run_parallel(lambda _: None, 2)  # and the threads are still there
