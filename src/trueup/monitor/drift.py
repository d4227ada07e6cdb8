"""A drift test whose false-alarm bound holds however long it runs and however often its result is read.

Calibration held out n clean images. Their scores cut the line into n + 1 gaps, and each new image falls into one of
them. If new images are exchangeable with the held-out ones, the gaps follow Pólya's urn, exactly and whatever the
distribution of the scores is: it starts with one ball for each gap; the next image falls into a gap with a probability
in proportion to its balls, and adds one ball to it. (Ranking each image among the n held-out images alone would be
wrong: all images would share the same n, and a long clean stream would end in an alarm.)

So an image takes the interval [a, b] of [0, 1] that its gap has in the urn, the most unusual gaps first, and a bet with
a density f pays the mean of f over [a, b]: 1 in expectation, whatever came before. Bets have the densities
f(u) = 1 - s + s κ u^(κ-1), for several shares s and exponents κ, and start at every image with a part of the capital.
The capital is a test martingale: by Ville's inequality the probability that it ever reaches 1/α is at most α.

References: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2nd edition, 2022), chapter 8; Shin,
Ramdas and Rinaldo, E-detectors (2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

BETS = ((1.0, 0.75), (1.0, 0.4), (0.2, 0.2), (0.03, 0.1))
"""Share s and exponent κ of each bet: all images a little unusual, all very, one in five, one in thirty."""
CHUNK = 1024  # images whose bets are settled together
BLOCK = 64  # images per block; all pairs within a block are compared
_SHARE, _POWER = np.array(BETS).T[:, :, None]
_BLOCK_OF = np.arange(CHUNK) // BLOCK
_IN_BLOCK = np.arange(CHUNK) % BLOCK > np.arange(BLOCK - 1)[:, None]  # (k, image): whether k + 1 before is in its block
WIDEST = 600.0  # range of logarithms whose exponentials a float64 can add up


def gaps_of(p: Floats, clean: int) -> Counts:
    """Gap between the scores of the `clean` held-out images that an image of p-value `p` falls into, 0 the farthest.

    p-values lie in [(k + 1) / (n + 1), (k + 2) / (n + 1)) for gap k; an image that is not finite has p = 0.

    >>> gaps_of(np.array([0.0, 0.2, 0.39, 0.4, 1.0]), 4)
    array([0, 0, 0, 1, 4])
    """
    return np.clip(np.floor(np.nan_to_num(p) * (clean + 1)).astype(np.int64) - 1, 0, clean)


def capital_left(images: Counts) -> Floats:
    """Share of the capital that is not yet staked after a number of `images`.

    It falls slowly: after a million images a bet can still start with 4e-9, which 20 very unusual images win back.
    """
    left: Floats = 1 / np.log2(images + 2.0)
    return left


@dataclass(frozen=True)
class Alarm:
    """The first time that the capital reached 1 / `false_alarm`."""

    at: float  # seconds since 1970
    since: float  # when the bet that won most had started
    image: int  # number of images that the test had seen


class DriftTest:
    """The test of one stream of images. `step` takes gaps in the order of the images, in batches of any size.

    >>> test = DriftTest(99, false_alarm=0.01)
    >>> test.step(np.zeros(5, dtype=int), np.arange(5.0))
    >>> test.alarm
    Alarm(at=2.0, since=0.0, image=3)
    """

    def __init__(self, clean: int, *, false_alarm: float = 0.001) -> None:
        self.clean, self.false_alarm = clean, false_alarm
        self.balls: Counts = np.ones(clean + 1, dtype=np.int64)
        self.images = 0
        self.log_e = 0.0  # logarithm of the capital
        self.log_largest = 0.0  # the largest that it has been
        self.alarm: Alarm | None = None
        self._bets: Floats = np.full(len(BETS), -np.inf)  # logarithm of the capital in each kind of bet
        self._best: Floats = np.full(len(BETS), -np.inf)  # the same of the starting time that has won most
        self._start: Floats = np.zeros(len(BETS))  # starting time that has won most

    def step(self, gaps: Counts, times: Floats) -> None:
        """Bet on images that fell into these gaps at these times, in their order."""
        for first in range(0, len(gaps), CHUNK):
            self._step(gaps[first : first + CHUNK], times[first : first + CHUNK])

    def _step(self, gaps: Counts, times: Floats) -> None:
        n = len(gaps)
        returns = np.log(self._returns(gaps))
        seen = self.images + np.arange(n + 1)
        left = capital_left(seen)
        stakes = np.log(-np.diff(left) / len(BETS))
        # A bet that starts at image k wins the returns from k on: their sum now, less their sum before k.
        won = np.cumsum(returns, axis=1)
        placed = np.concatenate([self._bets[:, None], stakes - (won - returns)], axis=1)
        bets = won + log_cumulative_sums(placed)[:, 1:]
        capital = np.concatenate([bets, np.log(left[None, 1:])])
        top = capital.max(axis=0)
        log_e = top + np.log(np.exp(capital - top).sum(axis=0))
        if self.alarm is None and (over := np.flatnonzero(log_e >= -math.log(self.false_alarm))).size:
            k = int(over[0])
            best, start = self._leaders(placed, won, times, k)
            self.alarm = Alarm(float(times[k]), float(start[best.argmax()]), int(seen[k]) + 1)
        self._best, self._start = self._leaders(placed, won, times, n - 1)
        self._bets = bets[:, -1].copy()
        self.log_e, self.log_largest = float(log_e[-1]), max(self.log_largest, float(log_e.max()))
        self.images += n
        self.balls += np.bincount(gaps, minlength=len(self.balls))

    def _returns(self, gaps: Counts) -> Floats:
        """Payoff per unit staked, for each kind of bet and image: `(bets, images)`."""
        beyond, inside = self._balls_before(gaps)
        total = len(self.balls) + self.images + np.arange(len(gaps))
        with np.errstate(divide="ignore"):  # exp(power * log(0)) is 0; powers would take ten times as long
            low, high = (np.exp(_POWER * np.log(balls / total)) for balls in (beyond, beyond + inside))
        paid: Floats = np.subtract(high, low, out=high)
        paid *= _SHARE
        paid *= total / inside
        paid += 1 - _SHARE
        return paid

    def _balls_before(self, gaps: Counts) -> tuple[Counts, Counts]:
        """Count the balls in more unusual gaps and in the image's own gap, at the moment when each image arrives."""
        n, size = len(gaps), len(self.balls)
        blocks = -(-n // BLOCK)
        padded = np.concatenate([gaps, np.full(blocks * BLOCK - n, size)]).reshape(blocks, BLOCK)
        places = padded + np.arange(blocks)[:, None] * (size + 1)
        added = np.bincount(places.ravel(), minlength=blocks * (size + 1)).reshape(blocks, size + 1)[:, :size]
        balls = self.balls + np.cumsum(added, axis=0) - added  # (blocks, gaps): before each block
        below = np.cumsum(balls, axis=1) - balls
        place = _BLOCK_OF[:n] * size + gaps
        short = gaps.astype(np.min_scalar_type(size))  # comparing a byte or two takes a fraction of the time
        # Row k: the image that came k + 1 before. Numpy is slow along short rows, so images are along the long ones.
        earlier = sliding_window_view(np.concatenate([np.zeros(BLOCK - 1, dtype=short.dtype), short[:-1]]), n)[::-1]
        less, same = (
            (compare(earlier, short) & _IN_BLOCK[:, :n]).view(np.uint8).sum(axis=0, dtype=np.uint8)
            for compare in (np.less, np.equal)
        )
        return below.take(place) + less, balls.take(place) + same

    def _leaders(self, placed: Floats, won: Floats, times: Floats, k: int) -> tuple[Floats, Floats]:
        """Capital after image `k` of the starting time that has won most by then, per kind of bet, and that time."""
        known = np.concatenate([self._best[:, None], placed[:, 1 : k + 2]], axis=1)
        place = k + 1 - known[:, ::-1].argmax(axis=1)  # the latest, if several won as much
        starts = np.where(place == 0, self._start, times[np.maximum(place - 1, 0)])
        return won[:, k] + known[np.arange(len(known)), place], starts

    @property
    def since(self) -> float:
        """Starting time of the bet that has won most so far: the estimate of when drift began."""
        return float(self._start[self._best.argmax()])

    def state(self) -> dict[str, Any]:
        """State of the test, in values that JSON can hold."""
        return {
            "clean": self.clean,
            "false_alarm": self.false_alarm,
            "balls": self.balls.tolist(),
            "images": self.images,
            "log_e": self.log_e,
            "log_largest": self.log_largest,
            "alarm": None if self.alarm is None else vars(self.alarm),
            "bets": [finite(x) for x in self._bets.tolist()],
            "best": [finite(x) for x in self._best.tolist()],
            "start": self._start.tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DriftTest:
        """Return the test that `state` describes."""
        test = cls(state["clean"], false_alarm=state["false_alarm"])
        test.balls = np.array(state["balls"], dtype=np.int64)
        test.images, test.log_e, test.log_largest = state["images"], state["log_e"], state["log_largest"]
        test.alarm = None if state["alarm"] is None else Alarm(**state["alarm"])
        test._bets, test._best = (np.array([-np.inf if x is None else x for x in state[k]]) for k in ("bets", "best"))
        test._start = np.array(state["start"])
        if len(test.balls) != test.clean + 1 or not len(test._bets) == len(test._best) == len(test._start) == len(BETS):
            raise ValueError("the state of this drift test does not fit together: it is of another version, or damaged")
        return test


def log_cumulative_sums(logs: Floats) -> Floats:
    """Logarithms of the cumulative sums of exp(logs), along each row; -inf counts as nothing.

    >>> log_cumulative_sums(np.log([[1.0, 2.0, 3.0]])).round(4)
    array([[0.    , 1.0986, 1.7918]])
    """
    found: Floats
    top = logs.max(axis=1, keepdims=True)
    first = logs[np.arange(len(logs)), np.isfinite(logs).argmax(axis=1)]
    if not (top[:, 0] - first < WIDEST).all():  # sums that are small at first would be lost
        found = np.logaddexp.accumulate(logs, axis=1)
        return found
    with np.errstate(divide="ignore"):
        found = top + np.log(np.cumsum(np.exp(logs - top), axis=1))
    return found


def finite(x: float) -> float | None:
    """Return None in place of an infinite number, which JSON cannot hold."""
    return x if math.isfinite(x) else None
