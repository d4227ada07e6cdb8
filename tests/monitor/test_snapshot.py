"""Snapshots: they add like the images behind them, keep their bounds, and survive a file."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import pytest
from scipy import stats

from trueup.monitor import Alarm, Drift, Snapshot, merged
from trueup.monitor.binomial import beta_cdf, share_of
from trueup.monitor.sealed import seal


@pytest.mark.parametrize(
    ("part", "whole"),
    [(0, 1), (1, 1), (0, 50), (50, 50), (3, 100), (99, 100), (17, 1000), (12_345, 1_000_000), (5, 10_000_000)],
)
def test_the_bounds_are_clopper_and_pearsons(part, whole):
    wanted = stats.binomtest(part, whole).proportion_ci(method="exact")
    found = share_of(part, whole)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@pytest.mark.parametrize(("x", "a", "b"), [(0.5, 2, 3), (1e-6, 1, 1e6), (0.999, 0.5, 0.5), (0, 1, 1), (1, 2, 2)])
def test_the_incomplete_beta_function_is_scipys(x, a, b):
    assert beta_cdf(x, a, b) == pytest.approx(stats.beta.cdf(x, a, b), rel=1e-9)


def test_no_images_have_no_share():
    assert math.isnan(share_of(0, 0).value)
    assert share_of(0, 0)[1:] == (0, 1)
    assert str(Snapshot(("a",), 0.01)) == "no images yet"


def drift(images, log_largest, since=None):
    alarm = None if since is None else Alarm(since + 5, since, images)
    return Drift(images, 0.0, log_largest, 0.001, alarm)


def window(images=10, streams=None, **more):
    return Snapshot(("a", "b"), 0.01, images, streams=streams or {}, began=5.0, ended=9.0, **more)


def sealed(**changes):
    """The text of a snapshot with other values, and a checksum that fits them."""
    return seal("trueup snapshot", 1, asdict(window()) | changes)


def test_of_one_stream_the_later_test_counts_once():
    both = window(streams={"x": drift(10, 1.0)}) + window(streams={"x": drift(20, 12.0, since=3.0)})
    assert both.streams == {"x": drift(20, 12.0, since=3.0)}
    assert both.log_e_value == 12.0
    assert both.drifted
    assert both.since.timestamp() == 3.0


def test_of_several_alarms_the_drift_that_began_first_counts():
    late = Drift(10, 0.0, 12.0, 0.001, Alarm(at=30.0, since=2.0, image=9))  # noticed later, but it began earlier
    both = window(streams={"x": Drift(10, 0.0, 12.0, 0.001, Alarm(at=20.0, since=8.0, image=5)), "y": late})
    assert both.since.timestamp() == 2.0


def test_of_several_streams_the_largest_e_value_counts_for_its_share():
    enough = -math.log(0.001)
    alone = window(streams={"x": drift(10, enough + 0.5, since=3.0)})
    assert alone.drifted
    three = alone + window(streams={"y": drift(10, 0.0)}) + window(streams={"z": drift(10, 0.0)})
    assert three.log_e_value == pytest.approx(enough + 0.5 - math.log(3))
    assert not three.drifted  # three tests: a false alarm of any of them is three times as likely
    assert three.since is None
    surer = three + window(streams={"w": drift(10, enough + 2, since=7.0)})
    assert surer.since.timestamp() == 7.0
    assert surer.false_alarm_probability == pytest.approx(4 * 0.001 * math.exp(-2))


def test_adding_is_associative_and_takes_the_whole_span():
    a, b, c = window(3, changed=1), window(4), Snapshot(("a", "b"), 0.01)
    assert (a + b) + c == a + (b + c)
    assert (c + a).began == 5.0
    assert (a + b).images == 7


def test_sum_adds_up_snapshots():
    assert sum([window(3), window(4), window(5)]) == window(12)
    with pytest.raises(TypeError):
        1 + window()


def test_snapshots_of_other_norms_or_levels_are_not_added():
    with pytest.raises(ValueError, match="norms is"):
        window() + Snapshot(("a",), 0.01)
    with pytest.raises(ValueError, match="unusual_at is 0.01 in one and 0.05 in the other"):
        window() + Snapshot(("a", "b"), 0.05)


def test_snapshots_of_two_calibrations_are_not_added():
    a, b, unknown = window(calibration="1f"), window(calibration="2e"), window()
    with pytest.raises(ValueError, match=r"two calibrations \(1f and 2e\); add up the windows of each .* by itself"):
        a + b
    for both in (a + unknown, unknown + a):
        assert (both.images, both.calibration) == (20, "1f")
    with pytest.raises(ValueError, match="two calibrations"):
        (a + unknown) + b


def test_files_of_earlier_versions_say_nothing_about_the_calibration():
    old = asdict(window())
    del old["calibration"]
    assert Snapshot.from_json(seal("trueup snapshot", 1, old)) == window()


def test_a_file_gives_back_the_snapshot(tmp_path):
    first = window(streams={"x": drift(10, 12.0, since=3.0)}, histogram=tuple(range(14)))
    first.save(tmp_path / "a.json")
    window(7).save(tmp_path / "b.json")
    assert Snapshot.load(tmp_path / "a.json") == first
    assert merged(tmp_path / "a.json", tmp_path / "b.json") == first + window(7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a trueup snapshot"),
        ("[]", "not a trueup snapshot"),
        ('{"format": "trueup snapshot", "version": 9}', "of version 9"),
        ('{"format": "trueup snapshot", "version": 1}', "a damaged trueup snapshot"),
        ("[" * 100_000, "not a trueup snapshot"),
        (seal("trueup snapshot", 1, {}), "not a complete snapshot"),
        (sealed(images=-1), "cannot be those of any images"),
        (sealed(images="10"), "cannot be those of any images"),
        (sealed(images=True), "cannot be those of any images"),
        (sealed(changed=3, compared=2), "cannot be those of any images"),
        (sealed(unusual_images=11), "cannot be those of any images"),
        (sealed(histogram=[1, 2]), "cannot be those of any images"),
        (sealed(evidence_sum=[1.0, "2"]), "cannot be those of any images"),
        (sealed(evidence_images=[1]), "cannot be those of any images"),
        (sealed(p_sum=-1.0), "cannot be those of any images"),
        (sealed(calibration=7), "cannot be those of any images"),
        (sealed(norms=[1, 2]), "cannot be those of any images"),
        (sealed(began="yesterday"), "cannot be those of any images"),
        (sealed(streams={"x": {"images": 3}}), "not a complete snapshot"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=f"x.json: .*{message}"):
        Snapshot.load(tmp_path / "x.json")


def test_a_flipped_bit_in_a_file_is_refused_or_changes_nothing(tmp_path):
    first, chance, refused = window(streams={"x": drift(10, 12.0, since=3.0)}), random.Random(0), 0
    path = tmp_path / "a.json"
    first.save(path)
    content = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            same = Snapshot.load(path) == first
        except ValueError as error:
            same = "a.json" in str(error)
            refused += 1
        assert same
    assert refused > 380


def test_it_says_what_it_knows():
    text = str(window(streams={"x": drift(10, 30.0, since=3.0)}, unusual_images=2, compared=4, changed=1, not_finite=1))
    assert "inputs have drifted since 1970-01-0" in text
    assert "e-value 10^13.0" in text
    assert "unusual (p <= 0.01): 20.00% of the images (2.52% to 55.61%)" in text
    assert "answers changed: 25.00% of 4 images" in text
    assert "not finite: 1 image" in text
