"""`trueup report` with the laboratory's models: by name, with the preprocessing of their training set."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli import application
from trueup_lab import models
from trueup_lab.cli.loading import load_by_name
from trueup_lab.data import digits
from trueup_lab.data.images import NORMALISATION

MODEL = "resnet20-bn-digits"


def test_a_bundled_model_reads_pictures_as_in_training(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    pixels = digits.load("test").images[0]
    pillow.fromarray(pixels[0].numpy()).save(tmp_path / "a.png")
    with pillow.open(tmp_path / "a.png") as picture:
        found = load_by_name(MODEL).preprocess(picture)
    assert found.equal(NORMALISATION["digits"](pixels[None])[0])
    wide = pillow.new("RGB", (300, 100))
    assert load_by_name("resnet20-bn-cifar10").preprocess(wide).shape == (3, 32, 32)
    assert load_by_name("unet-bn-scenes").preprocess(wide).shape == (3, 128, 224)


@pytest.mark.filterwarnings("ignore:correct. these targets carry no decision:UserWarning")
def test_a_report_on_a_bundled_model(call, tmp_path):
    """`call` has added the laboratory's loader."""
    pillow = pytest.importorskip("PIL.Image")
    clean = NORMALISATION["digits"](digits.load("train").images[:200])
    trueup.calibrate(models.load(MODEL).eval(), [clean], decide=False).save(tmp_path / "t.trueup")
    (tmp_path / "images").mkdir()
    for k, pixels in enumerate(digits.load("test").images[:6]):
        pillow.fromarray(pixels[0].numpy()).save(tmp_path / "images" / f"{k}.png")
    paths = [str(tmp_path / name) for name in ("t.trueup", "images")]
    done = CliRunner().invoke(application(), ["report", MODEL, *paths, "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert "images: 6 images" in done.output
    assert "ResNet20: images" in (tmp_path / "r.html").read_text()
    done = CliRunner().invoke(application(), ["report", "no-such-model", *paths])
    assert done.exit_code == 2
    assert "neither a file nor a model" in done.output
