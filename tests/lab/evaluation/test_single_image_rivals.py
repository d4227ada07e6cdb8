"""The single-image rivals, each against a direct formula on a tiny model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

from trueup_lab.evaluation import Plan, evaluate, parse_method, read_rows
from trueup_lab.evaluation.methods import Aqr, ChannelQuantile, InstanceAware, Intent, Memo, Pea, Views
from trueup_lab.evaluation.methods.norms import has_batch_norm

from .conftest import small_network

NEW = [InstanceAware(), ChannelQuantile(), Aqr(), Intent(), Views(), Pea(), Memo(views=4)]
names = {"ids": lambda method: method.name}


def prepared(method, model, clean):
    return method.prepare(model, method.calibrate(model, clean.split(5)) if hasattr(method, "calibrate") else None)


@pytest.fixture
def shifted_inputs(inputs):
    return inputs * 1.7 + 0.4


@pytest.mark.parametrize("method", NEW, **names)
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_untouched(method, training, network, inputs, shifted_inputs):
    network.train(training)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    prepared(method, network, inputs)(shifted_inputs)
    assert all(before[key].equal(value) for key, value in network.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(module.training == training for module in network.modules())


@pytest.mark.parametrize("method", NEW, **names)
def test_each_image_is_classified_on_its_own(method, network, inputs, shifted_inputs):
    assert method.needs.stateless
    run = prepared(method, network, inputs)
    alone = torch.cat([run(x[None]) for x in shifted_inputs])
    torch.testing.assert_close(run(shifted_inputs), alone, atol=1e-4, rtol=1e-4)
    assert (alone - network(shifted_inputs)).abs().max() > 1e-3  # it does something


@pytest.mark.parametrize("method", NEW, **names)
def test_needs_say_whether_batch_norm_is_required(method, inputs):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert not has_batch_norm(model)
    if method.needs.batch_norm:
        with pytest.raises(ValueError, match="Sequential has no batch norm"):
            prepared(method, model, inputs)
    else:
        assert prepared(method, model, inputs)(inputs).shape == (12, 4)


@pytest.mark.parametrize("method", [m for m in NEW if m.needs.targets], **names)
def test_methods_with_calibration_refuse_to_go_without(method, network):
    with pytest.raises(ValueError, match="needs targets, got None; make them with"):
        method.prepare(network, None)


@pytest.mark.parametrize("method", [ChannelQuantile(), Aqr(), Pea()], **names)
def test_a_model_without_norms_is_refused(method):
    with pytest.raises(ValueError, match="Sequential has no batch norm, group norm"):
        method.calibrate(nn.Sequential(nn.Flatten()), [torch.zeros(2, 1, 4, 4)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iabn:k=-1", "k=-1.0: expected a number of standard errors"),
        ("quantile:step=2", "between 0 and 1"),
        ("aqr:levels=1", "2 or more"),
        ("views:shift=-1", "whole number of pixels"),
        ("memo:rate=0", "above 0"),
        ("memo:views=0", "1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_the_runner_calibrates_and_measures_them_all(tmp_path, subject):
    plan = Plan(tuple(NEW), only=("fog",), images=6, calibrate=20)
    assert evaluate([subject], plan, tmp_path / "rows.csv", targets=tmp_path)
    rows = {row.method: row for row in read_rows(tmp_path / "rows.csv")}
    assert set(rows) == {method.name for method in NEW}
    assert {name for name, row in rows.items() if row.calibrated == 20} == {"quantile", "aqr", "pea"}
    assert rows["memo:views=4"].needs == "gradients, views"
    assert all(row.stream == "any" for row in rows.values())


@pytest.mark.parametrize("k", [0.0, 1.0, 4.0])
def test_iabn_follows_the_formula(k):
    """Channel by channel in plain numbers, from the formulas of NOTE."""
    norm = nn.BatchNorm2d(3).eval()
    for parameter, low, high in ((norm.weight, 0.5, 2), (norm.bias, -1, 1), (norm.running_var, 0.1, 2)):
        nn.init.uniform_(parameter, low, high)
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)) * 2 + 0.5
    found = InstanceAware(k).prepare(nn.Sequential(norm), None)(x)

    def shrink(value, threshold):
        return np.sign(value) * max(abs(value) - threshold, 0)

    for image in range(2):
        for c in range(3):
            pixels = x[image, c].double().numpy().ravel()
            mu, var = float(norm.running_mean[c]), float(norm.running_var[c])
            s_mu, s_var = np.sqrt((var + norm.eps) / 20), (var + norm.eps) * np.sqrt(2 / 19)
            new_mu = mu + shrink(pixels.mean() - mu, k * s_mu)
            new_var = max(0, var + shrink(pixels.var(ddof=1) - var, k * s_var))
            wanted = (pixels - new_mu) / np.sqrt(new_var + norm.eps)
            wanted = wanted * float(norm.weight[c].detach()) + float(norm.bias[c].detach())
            np.testing.assert_allclose(found[image, c].detach().numpy().ravel(), wanted, atol=1e-5, rtol=1e-4)


def test_iabn_leaves_maps_of_one_pixel_alone():
    norm = nn.BatchNorm2d(2).eval()
    x = torch.randn(3, 2, 1, 1)
    torch.testing.assert_close(InstanceAware().prepare(nn.Sequential(norm), None)(x), norm(x))


def _norm_only(channels=2):
    model = nn.Sequential(nn.BatchNorm2d(channels)).eval()
    clean = torch.randn(7, channels, 3, 4, generator=torch.Generator().manual_seed(1)) * 1.5 + 0.3
    image = torch.randn(1, channels, 3, 4, generator=torch.Generator().manual_seed(2)) * 0.4 - 1
    return model, clean, image


@pytest.mark.parametrize("pooled", [False, True])
def test_quantile_matching_is_the_quantile_function_of_the_rank(pooled):
    """NumPy's Hazen quantiles, of single images (the barycenter) or of all pixels together (AQR)."""
    model, clean, image = _norm_only()
    method = Aqr(levels=20) if pooled else ChannelQuantile(levels=20)
    found = prepared(method, model, clean)(image)
    levels = (np.arange(20) + 0.5) / 20
    with torch.no_grad():
        source, plain = model(clean).double().numpy(), model(image).double().numpy()
    for c in range(2):
        if pooled:
            q = np.quantile(source[:, c].ravel(), levels, method="hazen")
        else:
            q = np.mean([np.quantile(s[c].ravel(), levels, method="hazen") for s in source], axis=0)
        values = plain[0, c].ravel()
        share = (values.argsort().argsort() + 0.5) / len(values)
        np.testing.assert_allclose(found[0, c].detach().numpy().ravel(), np.interp(share, levels, q), atol=1e-5)


def test_equal_values_stay_equal_and_half_a_step_goes_half_way():
    model, clean, image = _norm_only()
    image[0, :, 0] = image[0, :, :1, :1].squeeze(1)
    targets = ChannelQuantile().calibrate(model, [clean])
    full, half = (ChannelQuantile(step).prepare(model, targets)(image) for step in (1.0, 0.5))
    assert (full[0, :, 0] == full[0, :, 0, :1]).all()
    with torch.no_grad():
        torch.testing.assert_close(half, (full + model(image)) / 2)


def test_intent_is_the_entropy_weighted_mean_of_six_predictions(network, shifted_inputs):
    """Each ratio by a model whose running statistics are set to the mixture of one image."""
    found = Intent().prepare(network, None)(shifted_inputs)
    for image, logits in zip(shifted_inputs, found, strict=True):
        predictions = torch.stack([_mixed_by_hand(network, image[None], r / 5) for r in range(6)])
        certainty = 1 + (predictions * predictions.log()).sum(1)
        wanted = (certainty.softmax(0)[:, None] * predictions).sum(0)
        torch.testing.assert_close(logits.exp(), wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def _mixed_by_hand(network, x, ratio):
    """Layer by layer, since a norm's statistics depend on the norms before it."""
    for module in copy.deepcopy(network):
        if isinstance(module, nn.BatchNorm2d):
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            module.running_mean.copy_((1 - ratio) * module.running_mean + ratio * mean)
            module.running_var.copy_((1 - ratio) * module.running_var + ratio * var)
        x = module(x)
    return x.softmax(1)[0]


def test_views_are_the_mean_over_original_mirror_and_shifts(network, inputs):
    found = Views(shift=2).prepare(network, None)(inputs)
    padded = F.pad(inputs, (2, 2, 2, 2), mode="replicate")
    crops = [padded[:, :, i : i + 28, j : j + 28] for i, j in ((2, 2), (0, 2), (4, 2), (2, 0), (2, 4))]
    wanted = torch.stack([network(view).softmax(1) for view in (*crops, inputs.flip(-1))]).mean(0)
    torch.testing.assert_close(found.exp(), wanted)
    torch.testing.assert_close(
        Views(shift=0, mirror=False).prepare(network, None)(inputs).exp(), network(inputs).softmax(1)
    )


def test_pea_follows_the_formula_with_scipy_s_matrix_roots():
    """Two norms, so that one has weight 0 and the other weight 1."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    clean, image = torch.randn(9, 3, 4, 4), torch.randn(1, 3, 4, 4) * torch.tensor([3.0, 1, 0.5])[:, None, None] + 1
    found = prepared(Pea(), model, clean)(image)

    with torch.no_grad():
        layers = [lambda x: model[0](x), lambda x: model(x)]
        source = [f(clean).double().transpose(0, 1).flatten(1).numpy() for f in layers]
        test = [f(image).double()[0].flatten(1).numpy() for f in layers]
    d = [
        np.mean(np.abs(s.mean(1) - t.mean(1)) + np.abs(s.var(1) - t.var(1))) for s, t in zip(source, test, strict=True)
    ]
    layer = int(np.argmax(d))  # weight 1; the other has weight 0 and stays as it is
    s, t = source[layer], test[layer]
    roots = scipy.linalg.sqrtm(np.cov(s, bias=True)) @ np.linalg.inv(scipy.linalg.sqrtm(np.cov(t, bias=True)))
    moved = roots @ (t - t.mean(1, keepdims=True)) + s.mean(1, keepdims=True)
    wanted = torch.from_numpy(moved).float().view(1, 3, 4, 4)
    with torch.no_grad():
        wanted = model[2](model[1](wanted)) if layer == 0 else wanted
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_pea_aligns_groups_of_64_channels(inputs):
    """Channels of different groups do not mix: the first 64 of 70 are aligned as if they were alone."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.BatchNorm2d(70), nn.BatchNorm2d(70)).eval()
    clean, image = torch.randn(6, 70, 12, 12), torch.randn(1, 70, 12, 12)
    moments = Pea().calibrate(wide, [clean])
    assert [c.shape[0] for c in moments["0"].covariances] == [64, 6]
    torch.testing.assert_close(moments["0"].variance.float(), wide[0](clean).var((0, 2, 3), correction=0))
    assert Pea().prepare(wide, moments)(image).isfinite().all()


def test_memo_is_one_step_of_a_plain_optimiser_from_the_same_start_for_each_image(inputs):
    model, method = small_network(), Memo(rate=0.05, views=5)
    found = method.prepare(model, None)(inputs[:3])
    for image, logits in zip(inputs[:3], found, strict=True):
        copied = copy.deepcopy(model)
        descent = torch.optim.SGD(copied.parameters(), lr=0.05)
        mean = copied(method.augment(image)).softmax(1).mean(0)
        (-(mean * mean.log()).sum()).backward()
        descent.step()
        torch.testing.assert_close(logits, copied(image[None])[0].detach(), atol=1e-5, rtol=1e-4)


def test_views_of_memo_differ_and_are_the_same_every_time(inputs):
    made = Memo(views=8).augment(inputs[0])
    assert made.equal(Memo(views=8).augment(inputs[0]))
    assert len({float(view.sum()) for view in made}) == 8
