"""The report: it says what was found, in one file that needs nothing else."""

from __future__ import annotations

import io
import math
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trueup
from architectures import images, make
from trueup.cli import application, loading
from trueup.report import find, page_of, write_report
from trueup.report.images import read_images
from trueup.report.svg import Band, depth_plot, histogram
from trueup.report.thumbnail import png, thumbnail
from trueup.targets.decision import LEFT_ALONE, Decision, Trial

RULE = trueup.Evidence(budget=1, strength=0.1, base=0)


@pytest.fixture(scope="module")
def calibrated():
    model = make("mobilenet")
    return model, trueup.calibrate(model, images(200).split(50), decide=False)


def noisy(count=20, seed=4):
    return images(count, seed=seed) + torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Text(HTMLParser):
    """Text of a page, and every address that it refers to. Fails if elements are not closed in order."""

    VOID = ("meta", "link", "br", "img", "circle", "path", "rect", "polygon", "polyline")

    def __init__(self, html):
        super().__init__()
        self.open, self.addresses, self.text = [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for key, value in attrs if key in ("src", "href", "action", "srcset")]
        if tag not in self.VOID or (tag in ("circle", "rect")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_it_finds_the_unusual_images_and_says_where_they_deviate(calibrated):
    model, targets = calibrated
    x = images(30, seed=4)
    x[[3, 17]] = noisy(2)
    found = find(model, targets, x, rule=RULE, most_unusual=2)
    (seen,) = found.sets
    assert {shown.number for shown in seen.shown} == {3, 17}
    for shown in seen.shown:
        assert shown.p == seen.p[shown.number] < 0.05
        largest = dict(zip(seen.norms, seen.evidence[shown.number].tolist(), strict=True))
        assert list(shown.evidence.items()) == sorted(largest.items(), key=lambda item: -item[1])[:3]
        assert shown.before == int(model(x)[shown.number].argmax())
    torch.testing.assert_close(seen.evidence, trueup.measure(model, targets, x).evidence)
    robust = trueup.correct(model, targets, RULE)
    assert seen.answers[1].equal(robust(x).argmax(dim=1))


def test_the_page_is_whole_and_refers_to_nothing_outside(calibrated, tmp_path):
    model, targets = calibrated
    classes = [f"<kind {k}>" for k in range(10)]
    write_report(tmp_path / "r.html", model, targets, noisy(), rule=RULE, classes=classes, title="A & B")
    html = (tmp_path / "r.html").read_text()
    page = Text(html)
    assert "A & B" in page.text
    assert "The images are not like those of calibration" in page.text
    assert "<kind " in page.text
    assert repr(RULE) in page.text
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"https?://|<script|@import|url\(", html)
    assert list(tmp_path.iterdir()) == [tmp_path / "r.html"]


def test_clean_images_get_a_good_word(calibrated):
    model, targets = calibrated
    page = Text(page_of(find(model, targets, images(60, seed=8), rule=RULE)))
    assert "No difference from the images of calibration was found" in page.text


def test_images_short_of_an_alarm_get_no_good_word(calibrated):
    """A capital of 100 leaves a probability of 0.01: too much for an alarm, too little to call it no difference."""
    model, targets = calibrated
    found = find(model, targets, images(60, seed=8), rule=RULE)
    (seen,) = found.sets
    streams = {name: replace(drift, log_largest=math.log(100)) for name, drift in seen.snapshot.streams.items()}
    near = replace(seen.snapshot, streams=streams)
    page = Text(page_of(replace(found, sets=[replace(seen, snapshot=near)])))
    assert "No difference" not in page.text
    assert "a difference this large has a probability of 0.01 at most" in page.text
    assert "alarm at 0.001" in page.text


def test_images_that_deviate_only_deep_in_the_network_get_no_good_word(calibrated):
    """The drift test reads the first norm. What the plots show at the others must not be called no difference."""
    model, targets = calibrated
    found = find(model, targets, images(60, seed=8), rule=RULE)
    (seen,) = found.sets
    far = seen.evidence.clone()
    far[:45, -1] = 50.0  # three quarters of the images, at the last norm
    page = Text(page_of(replace(found, sets=[replace(seen, evidence=far)])))
    share = (far[:, -1] > found.clean_evidence[seen.norms[-1]].median()).double().mean()
    assert f"deviate from those of calibration at 1 of {len(seen.norms)} norms" in page.text
    assert f"At {seen.norms[-1]}, {share:.0%} of them" in page.text
    assert "No difference" not in page.text


def test_images_that_are_not_finite_count_as_deviating(calibrated):
    model, targets = calibrated
    found = find(model, targets, images(60, seed=8), rule=RULE)
    (seen,) = found.sets
    spoilt = torch.where(torch.arange(60)[:, None] < 54, torch.nan, 0.0).expand_as(seen.evidence)
    page = Text(page_of(replace(found, sets=[replace(seen, evidence=spoilt)])))
    assert f"deviate from those of calibration at {len(seen.norms)} of {len(seen.norms)} norms" in page.text


def test_two_sets_are_compared(calibrated):
    model, targets = calibrated
    found = find(model, targets, noisy(), against=[images(20, seed=8)], names=("today", "yesterday"), rule=RULE)
    page = Text(page_of(found))
    today, yesterday = found.sets
    assert (today.snapshot.unusual.value, yesterday.images) == (1.0, 20)
    difference = 100 * (1 - yesterday.snapshot.unusual.value)
    assert f"{difference:.1f} points higher in “today” than in “yesterday”" in page.text
    # The share is 100 % in one set, whose own standard error would be 0: one success and one failure are added to each.
    shares = [(some.snapshot.unusual_images + 1) / 22 for some in (today, yesterday)]
    error = 100 * math.sqrt(sum(share * (1 - share) / 22 for share in shares))
    assert f"(standard error {error:.1f})" in page.text
    means = [some.p.mean() for some in (today, yesterday)]
    assert f"Mean p-values are {means[0]:.2f} and {means[1]:.2f}" in page.text
    same = find(
        model, targets, images(20, seed=8), against=[images(20, seed=8)], names=("today", "yesterday"), rule=RULE
    )
    assert "The share of unusual images is the same in “today” and “yesterday”" in Text(page_of(same)).text


def test_no_figure_is_green_under_an_alarm(calibrated):
    """Many images may be a little unusual and none of them very."""
    model, targets = calibrated
    found = find(model, targets, noisy(), rule=RULE)
    (seen,) = found.sets
    calm = replace(found, sets=[replace(seen, snapshot=replace(seen.snapshot, unusual_images=0))])
    assert seen.snapshot.drifted
    assert 'class="good"' not in page_of(calm)


def test_images_that_are_preprocessed_in_another_way_are_told_so(calibrated):
    model, targets = calibrated
    found = find(model, targets, images(40, seed=8) * 64 + 128, rule=RULE)  # 0 to 255
    assert found.sets[0].farthest == 40
    assert (
        "40 of 40 are as unusual as an image can be: check that these images are preprocessed as in"
        in Text(page_of(found)).text
    )
    some = torch.cat([images(20, seed=8), images(20, seed=8) * 64 + 128])  # half of them cannot be preprocessing
    found = find(model, targets, some, rule=RULE)
    assert found.sets[0].farthest == 20
    assert found.sets[0].snapshot.drifted
    assert "preprocessed" not in Text(page_of(found)).text


def test_images_are_called_by_the_names_of_their_files(calibrated, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "set" / "monday").mkdir(parents=True)
    for name, value in (("b.png", 90), ("monday/a & <b>.png", 160), ("c.png", 10)):
        pillow.new("L", (32, 32), value).save(tmp_path / "set" / name)
    np.save(tmp_path / "ready.npy", images(3).numpy())

    def preprocess(picture):
        return torch.tensor(np.asarray(picture)).float().expand(3, 32, 32) / 128 - 1

    folder = read_images(tmp_path / "set", preprocess, batch=2)
    assert folder.names == ["b.png", "c.png", "monday/a & <b>.png"]
    found = find(*calibrated, folder, against=read_images(tmp_path / "ready.npy", None), rule=RULE)
    files, ready = ({shown.number: shown.name for shown in some.shown} for some in found.sets)
    assert files == dict(enumerate(folder.names))
    assert ready == {k: f"ready.npy[{k}]" for k in range(3)}
    page = Text(page_of(found))
    assert "monday/a & <b>.png" in page.text
    assert "ready.npy[2]" in page.text


def test_the_decision_and_its_trials_are_told(calibrated):
    model, targets = calibrated
    trials = (Trial(LEFT_ALONE, 100, 0.0, (95.0, 80.0), 0.0, 0.0), Trial(RULE, 100, 1.0, (96.0, 88.0), 5.0, 2.0))
    decided = replace(targets, decision=Decision(trials))
    page = Text(page_of(find(model, decided, images(8, seed=8))))
    assert str(decided.decision) in page.text
    assert "All 2 settings" in page.text
    assert "5.00 ± 1.33" in page.text
    assert "This is not the rule" not in page.text
    other = Text(page_of(find(model, decided, images(8, seed=8), rule=trueup.Evidence())))
    assert "This is not the rule that calibration chose" in other.text


def test_models_without_norms_or_class_scores_get_a_report_too():
    model = make("vgg")
    targets = trueup.calibrate(model, [images(40)], decide=False)
    page = Text(page_of(find(model, targets, images(8), rule=trueup.Correction())))
    assert "cannot tell how unusual" in page.text
    dense = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    targets = trueup.calibrate(dense, [images(40)], decide=False)
    page = Text(page_of(find(dense, targets, images(8), rule=trueup.Evidence(depth=1))))
    assert "not class scores" in page.text


def test_images_that_are_not_finite_are_shown_first(calibrated):
    model, targets = calibrated
    x = images(6, seed=3)
    x[4] = torch.nan
    found = find(model, targets, x, rule=RULE)
    assert found.sets[0].shown[0].number == 4
    assert "p = 0 (not finite)" in Text(page_of(found)).text


def test_too_few_calibration_images_are_an_error_that_says_what_to_do(calibrated):
    model, _ = calibrated
    few = trueup.calibrate(model, [images(5)], decide=False)
    with pytest.raises(ValueError, match="^these targets hold only 5 images.*calibrate a model .* on 8 images or more"):
        find(model, few, images(6), rule=RULE)


class Counting(nn.Module):
    """Counts its images in a buffer, in evaluation mode too, and shows the count in its scores."""

    def __init__(self):
        super().__init__()
        self.inner = make("mobilenet")
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.inner(x) * 0 + self.seen * torch.arange(10)


def test_buffers_that_the_forward_pass_changes_are_left_as_they_are():
    model = Counting().eval()
    targets = trueup.calibrate(model, [images(40)], decide=False)
    for rule in (RULE, trueup.Correction()):
        find(model, targets, images(6), rule=rule)
    assert model.seen == 0


def test_no_images_are_an_error(calibrated):
    with pytest.raises(ValueError, match="there are no images"):
        find(*calibrated, [], rule=RULE)


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 5, 7)])
def test_pictures_are_read_back_by_pillow(shape):
    pillow = pytest.importorskip("PIL.Image")
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picture = np.asarray(pillow.open(io.BytesIO(png(pixels))))
    np.testing.assert_array_equal(picture.reshape(5, 7, -1), pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("shape", "size"),
    [((3, 200, 100), (48, 96)), ((5, 8, 8), (8, 8)), ((1, 8, 8), (8, 8)), ((12,), (12, 1)), ((2, 9, 9), (9, 9))],
)
def test_thumbnails_are_small_whatever_the_image(shape, size):
    pillow = pytest.importorskip("PIL.Image")
    image = torch.rand(shape)
    limits = (torch.zeros(shape[0] if len(shape) == 3 else 1), torch.ones(shape[0] if len(shape) == 3 else 1))
    assert pillow.open(io.BytesIO(thumbnail(image, limits))).size == size


def test_plots_hold_every_point_within_their_frame():
    band = Band("x", "a", [0.1, 1, 0], [2, 3, float("nan")], [1e9, 4, float("inf")])
    for drawn in (
        depth_plot([band], ["p", "q", "r"], caption="c", x="x", log=True),
        depth_plot([band], ["p", "q", "r"], caption="c", x="x", top=1.0),
        histogram([("x", "a", [0.5, 0.0])], edges=[0, 0.5, 1], expected=0.1, caption="c", x="x"),
    ):
        numbers = [
            float(y) for _, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall('points="(.*?)"', drawn)))
        ]
        assert all(0 <= y <= 220 for y in numbers)
        assert "nan" not in drawn.replace("p: nan", "").replace("r: nan", "")


def test_the_command_writes_a_report(calibrated, tmp_path, monkeypatch):
    _model, targets = calibrated
    pillow = pytest.importorskip("PIL.Image")
    targets.save(tmp_path / "t.trueup")
    for name, some in (("now", noisy(6)), ("then", images(6, seed=3))):
        (tmp_path / name).mkdir()
        for k, image in enumerate(some):
            pixels = (image.clamp(-1, 1) * 127 + 128).byte().permute(1, 2, 0).numpy()
            pillow.fromarray(pixels).save(tmp_path / name / f"{k}.png")
    (tmp_path / "given_models.py").write_text(
        "import numpy, torch\nfrom architectures import make\n"
        "def preprocess(image):\n"
        "    return (torch.tensor(numpy.asarray(image)).permute(2, 0, 1).float() - 128) / 127\n"
        "def load():\n    return make('mobilenet'), preprocess\n"
        "def bare():\n    return make('mobilenet')\n"
        "def broken():\n    return None.weights\n"
        "def absent():\n    return open('weights.pt')\n"
        "def uneven():\n"
        "    return make('mobilenet'), lambda image: preprocess(image)[:, : 16 if '3' in image.filename else 32]\n"
    )
    monkeypatch.setattr(loading, "LOADERS", [])  # the laboratory adds its own
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    np.save(tmp_path / "ready.npy", images(5, seed=3).numpy())

    def run(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # a command shows them as lines
            return CliRunner().invoke(application(), ["report", *map(str, arguments)])

    done = run("given_models:load", "t.trueup", "now", "--against", "then", "--out", "r.html")
    assert re.search("^warning: .*carry no decision", done.output, re.MULTILINE)
    assert done.exit_code == 0, done.output
    assert "now: 6 images" in done.output
    assert "than in “then”" in Text((tmp_path / "r.html").read_text()).text
    done = run("given_models:bare", "t.trueup", "ready.npy", "--out", "s.html", "--limit", "3")
    assert "ready.npy: 3 images" in done.output, done.output
    for arguments, message in [
        (("given_models:bare", "t.trueup", "now"), "return (model, preprocess)"),
        (("given_models:nothing", "t.trueup", "now"), "has no attribute 'nothing'"),
        (("no_such_module:f", "t.trueup", "now"), "No module named 'no_such_module'; run the command in the folder of"),
        (("given_models:load", "t.trueup", "nowhere"), "nowhere does not exist; give a folder of images"),
        (("math:gamma.__class__", "t.trueup", "now"), "has no attribute"),
        (("os:getcwd", "t.trueup", "now"), "returned a str, not a model"),
        (
            ("given_models:broken", "t.trueup", "now"),
            "given_models:broken failed with AttributeError: 'NoneType' object",
        ),
        (("given_models:absent", "t.trueup", "now"), "weights.pt: No such file or directory; check the path"),
        (
            ("given_models:uneven", "t.trueup", "now"),
            "preprocess turned now/3.png into a tensor of shape (3, 16, 32), and now/0.png into (3, 32, 32); resize",
        ),
        (("resnet", "t.trueup", "now"), "expected package.module:function"),
    ]:
        done = run(*arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split()), done.output
    assert isinstance(run("given_models:broken", "t.trueup", "now", "--debug").exception.__cause__, AttributeError)
