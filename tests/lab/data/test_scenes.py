"""Drawn scenes: the same every time, masks and depths that fit the picture, weather that hides distant things."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trueup_lab import models
from trueup_lab.data import scenes
from trueup_lab.data.images import NORMALISATION
from trueup_lab.data.scenes import CLASSES, COLOURS, WEATHERS, apply_weather, draw_street
from trueup_lab.data.scenes.canvas import FARTHEST, Camera, Canvas
from trueup_lab.data.scenes.classes import BUILDING, CAR, PERSON, ROAD, SKY


@pytest.fixture(scope="module")
def few():
    return scenes.draw_scenes("test", 8)


def test_a_number_is_a_scene(few):
    again = draw_street(scenes.FIRST["test"] + 3)
    assert all(np.array_equal(a, b) for a, b in zip(few[3], again, strict=True))
    assert not np.array_equal(few[3].image, few[4].image)
    assert not np.array_equal(draw_street(5, seed=1).image, draw_street(5).image)


def test_every_class_occurs_and_has_a_colour(few):
    there = np.unique(np.concatenate([scene.mask.ravel() for scene in few]))
    assert there.tolist() == list(range(len(CLASSES)))
    assert len(set(COLOURS)) == len(CLASSES)
    for scene in few:
        assert scene.image.shape == (128, 224, 3)
        assert scene.image.dtype == scene.mask.dtype == np.uint8
        assert (scene.mask[-1] == ROAD).mean() > 0.2  # the camera drives on it


def test_depth_is_that_of_the_thing(few):
    for scene in few:
        assert (scene.depth[scene.mask == SKY] == FARTHEST).all()
        assert scene.depth[-1].min() < 6  # the ground right ahead
        for kind in (CAR, PERSON):
            assert (scene.depth[scene.mask == kind] < 75).all()
        assert (scene.depth[scene.mask == BUILDING] < 130).all()
        road = scene.mask == ROAD
        rows = np.arange(128)[:, None].repeat(224, 1)
        assert np.corrcoef(rows[road], -scene.depth[road])[0, 1] > 0.3  # nearer towards the bottom


def test_a_nearer_thing_covers_a_farther_one_in_all_three():
    canvas = Canvas(10, 12)
    square = [(2.0, 2.0), (2.0, 8.0), (9.0, 8.0), (9.0, 2.0)]
    canvas.polygon(square, (10, 20, 30), CAR, 50.0)
    canvas.ellipse((5.5, 5.0), (2.0, 2.0), (200, 0, 0), PERSON, 20.0)
    canvas.detail([(2.0, 2.0), (2.0, 3.0), (9.0, 3.0), (9.0, 2.0)], (0, 0, 255))
    picture, mask, depth = canvas.finished()
    assert (mask[5, 5], depth[5, 5], picture[5, 5].tolist()) == (PERSON, 20.0, [200, 0, 0])
    assert (mask[7, 3], depth[7, 3], picture[7, 3].tolist()) == (CAR, 50.0, [10, 20, 30])
    assert (mask[2, 5], depth[2, 5], picture[2, 5].tolist()) == (CAR, 50.0, [0, 0, 255])  # a detail is paint only


def test_the_camera_sees_what_is_twice_as_far_half_as_large():
    camera = Camera(focal=100.0, height=1.5, middle=112.0, horizon=60.0)
    near, far = (camera.project(2.0, 0.0, ahead)[0] - 112.0 for ahead in (10.0, 20.0))
    assert near == pytest.approx(2 * far)
    assert camera.project(0.0, 1.5, 10.0) == pytest.approx((112.0, 60.0))  # eye height lies on the horizon


@pytest.mark.parametrize("weather", WEATHERS)
def test_weather_grows_with_severity_and_is_the_same_every_time(few, weather):
    scene = few[0]
    made = [apply_weather(scene, weather, severity, number=4) for severity in range(1, 6)]
    change = [np.abs(picture.astype(float) - scene.image).mean() for picture in made]
    assert change == sorted(change)
    assert change[0] > 1
    assert np.array_equal(made[2], apply_weather(scene, weather, 3, number=4))


def test_fog_hides_what_is_far_more_than_what_is_near(few):
    scene = few[1]
    foggy = apply_weather(scene, "fog", 3)
    far, near = (scene.depth > 60) & (scene.mask != SKY), scene.depth < 8

    def contrast(picture, where):
        return picture[where].astype(float).std(axis=0).mean()

    assert contrast(foggy, far) < 0.2 * contrast(scene.image, far)
    assert contrast(foggy, near) > 0.5 * contrast(scene.image, near)


@pytest.mark.parametrize(
    ("weather", "severity", "message"), [("hail", 1, "unknown weather 'hail'"), ("fog", 6, "1 to 5")]
)
def test_unknown_weather_is_refused(few, weather, severity, message):
    with pytest.raises(ValueError, match=message):
        apply_weather(few[0], weather, severity)


def test_the_set_holds_pictures_and_masks_and_its_splits_share_nothing(monkeypatch):
    monkeypatch.setattr(scenes, "TRAIN", 3)
    monkeypatch.setattr(scenes, "TEST", 2)
    train, test = scenes.load("train"), scenes.load("test")
    assert train.images.shape == (3, 3, 128, 224)
    assert train.labels.shape == (3, 128, 224)
    assert test.images.dtype == test.labels.dtype == torch.uint8
    assert not any(a.equal(b) for a in train.images for b in test.images)
    with pytest.raises(ValueError, match="unknown split 'valid'"):
        scenes.load("valid")


def test_the_network_of_the_demonstration_knows_scenes_as_its_record_says(few):
    """Eight scenes are a small sample: within a point and a half of the 98 % of its pixels."""
    images = scenes.as_images(few)
    with torch.inference_mode():
        said = models.load("unet-bn-scenes")(NORMALISATION["scenes"](images.images)).argmax(1)
    (accuracy,) = models.record("unet-bn-scenes").accuracy.values()
    assert abs((said == images.labels).double().mean().item() - accuracy) < 0.015
    assert accuracy > 0.97
