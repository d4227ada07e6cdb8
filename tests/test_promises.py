"""The promises of the library, each on real architectures and for every rule."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import architectures
import trueup
from architectures import images, make
from trueup import functional as F
from trueup.decide.search import CANDIDATES, TUNED_CANDIDATES

STRONG = trueup.Correction(lambda1=1, lambda2=0.2, location="match")
EVIDENCE = trueup.Evidence(budget=1, strength=0.05)
GATED = trueup.Evidence(budget=0.01, strength=0.05, least=0.2)
CAREFUL = replace(GATED, least=0)
# torch rounds a convolution differently in another batch or when compiled. Where a value then falls into the next bin
# of a histogram, it is moved by a bin's width more or less; a sort does not notice, nor do means.
RULES = [
    (replace(STRONG, method="sort"), 1e-5),
    (replace(STRONG, method="histogram"), 1e-3),
    *((rule, 1e-4) for rule in (EVIDENCE, GATED, CAREFUL)),
]
NORMED = ["mobilenet", "densenet", "convnext", "vit", "resnet"]  # the architectures with norms


def named(rule):
    if isinstance(rule, trueup.Correction):
        return rule.method
    return "evidence" if rule.budget == 1 else "gated" if rule.least else "careful"


rules = pytest.mark.parametrize(("rule", "atol"), [pytest.param(rule, atol, id=named(rule)) for rule, atol in RULES])
everywhere = pytest.mark.parametrize("name", architectures.ALL)
everywhere_and_all = pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(name, STRONG, id=name) for name in architectures.ALL]
    + [pytest.param(name, rule, id=f"{name}-{named(rule)}") for name in NORMED for rule in (EVIDENCE, GATED)],
)
every = pytest.mark.parametrize("rule", [STRONG, EVIDENCE, GATED, CAREFUL], ids=named)


def corrected(name, rule=STRONG):
    model = make(name)
    method = getattr(rule, "method", "auto")
    return model, trueup.correct(model, trueup.calibrate(model, images(24).split(8), method=method, decide=False), rule)


@functools.cache
def calibrated_at(size):
    """Targets of a ResNet from textures of this size, with the drift that a decision measures."""
    return trueup.calibrate(make("resnet"), textures(120, size).split(60))


def names(sites):
    return [site.name for site in sites]


def unfused(robust):
    """The same, with every norm, sum and ReLU where the model has it."""
    for module in robust.placed:
        module.fuses = ()
    return copy.deepcopy(robust)  # a copy is built again


def dark(count=8):
    """Images unlike those of calibration."""
    return images(count, seed=3) * 0.3 - 1


def textures(count, size, seed=1):
    """Noise that is smooth over three pixels."""
    noise = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    return 3 * torch.nn.functional.avg_pool2d(noise, 3, 1, 1, count_include_pad=False)


class TestWhatItSays:
    def test_the_corrected_module_knows_its_rule_and_its_sites(self):
        model, robust = corrected("resnet", GATED)
        assert isinstance(robust, trueup.Corrected)
        assert robust.rule == GATED
        assert all(isinstance(site, trueup.Site) for site in robust.sites)
        assert robust.sites == tuple(site for site in trueup.sites(model) if site.name in robust.placed_at)

    @pytest.mark.parametrize(
        ("rule", "text"),
        [
            (STRONG, r"Corrected\(ResNet, Correction\(lambda1=1, .*\), 7 activations\)"),
            (GATED, r"Corrected\(ResNet, Evidence\(budget=0.01, .*\), 6 norms\)"),
            (
                trueup.Evidence(strength=0, base=0),
                r"Corrected\(ResNet, Evidence.*no sites: it does what the model does\)",
            ),
        ],
        ids=["paper", "gated", "nothing"],
    )
    def test_it_prints_in_one_line(self, rule, text):
        assert re.fullmatch(text, repr(corrected("resnet", rule)[1]))


class TestUntouched:
    @everywhere
    def test_the_model_is_bit_identical_after_every_verb(self, name):
        model, x = make(name), images(8)
        before = copy.deepcopy(model.state_dict())
        outputs, structure = model(x), repr(model)
        targets = trueup.calibrate(model, [x], decide=False)
        for rule in (STRONG, EVIDENCE, GATED, CAREFUL) if name in NORMED else (STRONG,):
            trueup.correct(model, targets, rule)(x)
        trueup.measure(model, targets, x), trueup.sites(model, x)
        if name in NORMED:
            trueup.choose(model, targets, [x], 0.5)
        for key, value in model.state_dict().items():
            assert value.equal(before[key]), key
        assert model(x).equal(outputs)
        assert repr(model) == structure
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    @every
    def test_a_model_in_training_mode_stays_so_and_its_running_statistics_stand(self, rule):
        model = make("resnet").train()
        before = copy.deepcopy(model.state_dict())
        targets = trueup.calibrate(model, [images(8)], decide=False)
        robust = trueup.correct(model, targets, rule)
        assert not robust.training
        assert all(module.training for module in model.modules())
        robust(images(4))
        robust.eval()
        assert all(module.training for module in model.modules())
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())

    @everywhere_and_all
    def test_weights_are_shared_and_none_are_added(self, name, rule):
        model, robust = corrected(name, rule)
        mine, theirs = list(model.parameters()), list(robust.parameters())
        assert [p.data_ptr() for p in mine] == [p.data_ptr() for p in theirs]
        assert {id(p) for p in mine} == {id(p) for p in theirs}

    @every
    def test_moving_or_casting_the_corrected_module_leaves_the_model(self, rule):
        model, robust = corrected("mobilenet", rule)
        wanted = robust(images(4))
        robust.double()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}
        torch.testing.assert_close(robust(images(4).double()).float(), wanted, atol=1e-4, rtol=1e-4)


class TestStateless:
    @pytest.mark.parametrize(
        ("name", "rule", "atol"),
        [
            pytest.param(name, rule, atol, id=f"{name}-{named(rule)}")
            for name in architectures.ALL
            for rule, atol in RULES
            if name in NORMED or isinstance(rule, trueup.Correction)
        ],
    )
    def test_an_image_has_one_answer_in_any_batch_order_and_company(self, name, rule, atol):
        _, robust = corrected(name, rule)
        x = torch.cat([images(6), dark(6)])
        together = robust(x)
        order = torch.randperm(12)
        torch.testing.assert_close(robust(x[order]), together[order], atol=atol, rtol=1e-4)
        torch.testing.assert_close(torch.cat([robust(image[None]) for image in x]), together, atol=atol, rtol=1e-4)
        torch.testing.assert_close(torch.cat([robust(part) for part in x.split(5)]), together, atol=atol, rtol=1e-4)
        wild = torch.cat([x[:6], 1e3 * dark(6)])
        torch.testing.assert_close(robust(wild)[:6], together[:6], atol=atol, rtol=1e-4)


class TestIdentity:
    @everywhere_and_all
    def test_a_rule_of_no_strength_gives_the_models_bits(self, name, rule):
        nothings = [trueup.Evidence(budget=0, least=0), trueup.Evidence(strength=0, base=0)]
        for nothing in nothings if isinstance(rule, trueup.Evidence) else [trueup.Correction(lambda1=0)]:
            model, robust = corrected(name, nothing)
            assert robust(dark()).equal(model(dark()))
        assert not corrected(name, rule)[1](dark()).equal(model(dark()))

    @pytest.mark.parametrize("name", NORMED)
    def test_an_image_inside_cleans_range_has_the_models_bits_beside_one_that_is_not(self, name):
        model = make(name)
        targets = trueup.calibrate(model, images(200).split(50), decide=False)
        robust, x = trueup.correct(model, targets, CAREFUL), torch.cat([images(12, seed=7), dark(4)])
        usual = trueup.measure(model, targets, x).image_rank <= 1 - 20 * CAREFUL.budget
        assert 2 <= usual.sum() <= 12
        changed = (robust(x) != model(x)).any(dim=1)
        assert changed.equal(~usual)

    @pytest.mark.parametrize("name", NORMED)
    def test_every_image_is_corrected_and_an_unusual_one_by_more(self, name):
        model = make(name)
        targets = trueup.calibrate(model, images(200).split(50), decide=False)
        x = torch.cat([images(12, seed=7), dark(4)])
        rule = replace(GATED, budget=1e-6)  # the gate stays shut
        least = trueup.correct(model, targets, rule)
        assert least.sites == trueup.correct(model, targets, EVIDENCE).sites
        assert not (least(x) == model(x)).all(dim=1).any()
        assert trueup.correct(model, targets, replace(rule, budget=0))(x).equal(least(x))
        seen = []
        robust = trueup.correct(model, targets, GATED)
        robust.combine.register_forward_hook(lambda _m, _i, out: seen.append(out))
        more = (robust(x) - least(x)).abs().amax(dim=1)
        assert (more > 0).equal(seen[0] > 0.2)
        assert seen[0].min() == pytest.approx(0.2)
        assert (seen[0][12:] > 0.9).all()

    def test_where_it_is_not_known_how_unusual_an_image_is_evidence_counts_half(self):
        model = make("resnet")
        targets = trueup.calibrate(model, images(48).split(24), decide=False)
        robust, whole = (trueup.correct(model, targets, rule) for rule in (GATED, EVIDENCE))
        early = robust.placed_at[: robust.placed_at.index(list(targets.gate)[-1])]
        assert early
        for name, ours, theirs in zip(robust.placed_at, robust.placed, whole.placed, strict=True):
            share = 0.5 if name in early else 1
            torch.testing.assert_close(ours.reference[2] * share, theirs.reference[2])
            torch.testing.assert_close(ours.reference[4], theirs.reference[4] * share)
        all_open = trueup.correct(model, targets, replace(GATED, budget=1))
        assert all_open(dark()).equal(whole(dark()))

    def test_there_must_be_something_left_to_correct(self):
        model = make("resnet")
        targets = trueup.calibrate(model, [images(20)], decide=False)
        first = lambda site: site.name == "layer1.0.bn1"  # noqa: E731
        assert not trueup.correct(model, targets, GATED, select=first)(dark()).equal(model(dark()))
        with pytest.raises(ValueError, match="nothing to correct.*with least=0, all norms before the gate.*least=0.05"):
            trueup.correct(model, targets, CAREFUL, select=first)

    def test_early_norms_are_left_where_usual_images_are(self):
        model, gated = corrected("resnet", GATED)
        _, careful = corrected("resnet", CAREFUL)
        assert gated.sites[len(gated.sites) - len(careful.sites) :] == careful.sites
        assert len(careful.sites) < len(gated.sites)
        assert not careful(dark()).equal(model(dark()))

    @pytest.mark.parametrize("rule", [EVIDENCE, GATED, CAREFUL], ids=named)
    @pytest.mark.parametrize(("norms", "left"), [(1, 0), (7, 0), (8, 1), (22, 1), (23, 2), (53, 4)])
    def test_the_last_fifteenth_of_the_models_norms_is_left(self, norms, left, rule):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(layer for _ in range(norms) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
        ).eval()
        all_of_them = names(trueup.sites(model))
        gate = -(-norms // 3) - 1 if rule is CAREFUL else 0  # the last norm that is read
        moved = all_of_them[gate : norms - left]
        targets = trueup.calibrate(model, [images(24)], select=lambda site: site.kind == "norm", decide=False)
        assert names(trueup.correct(model, targets, rule).sites) == moved
        some = trueup.calibrate(
            model, [images(24)], select=lambda site: site.name in all_of_them[: norms // 2 + 1], decide=False
        )
        assert names(trueup.correct(model, some, rule).sites) == [name for name in moved if name in some.norms]
        if left:
            last = lambda site: site.name == all_of_them[-1]  # noqa: E731
            with pytest.raises(ValueError, match="nothing to correct: Evidence.* skips the last 7% of the norms"):
                trueup.correct(model, targets, rule, select=last)

    @pytest.mark.parametrize("name", NORMED)
    def test_a_least_gate_value_of_one_is_no_gate(self, name):
        model = make(name)
        targets = trueup.calibrate(model, images(48).split(24), decide=False)
        wanted = trueup.correct(model, targets, EVIDENCE)(dark())
        whole = trueup.correct(model, targets, replace(GATED, least=1))
        assert not whole.readers
        assert whole(dark()).equal(wanted)
        nearly = trueup.correct(model, targets, replace(GATED, least=1 - 1e-6))(dark())
        torch.testing.assert_close(nearly, wanted, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", NORMED)
    def test_a_base_moves_every_image_without_evidence(self, name):
        model, robust = corrected(name, trueup.Evidence(budget=1, strength=0, base=0.2))
        assert not (robust(images(4)) == model(images(4))).all(dim=1).any()
        _, more = corrected(name, trueup.Evidence(budget=1, strength=0, base=0.4))
        moved, farther = ((r(dark()) - model(dark())).norm() for r in (robust, more))
        assert 1.2 * moved < farther

    def test_full_strength_lands_on_the_targets_shape_at_every_site(self):
        torch.manual_seed(0)  # leaky and in float64, so that there are no ties
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU()).double()
        targets = trueup.calibrate(model, [images(24).double()], resolution=None, decide=False)
        robust = trueup.correct(model, targets, trueup.Correction(1, 0, location="match", sparse=False))
        seen = {}
        for name, module in zip(robust.placed_at, robust.placed, strict=True):
            module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out}))
        robust(dark().double())
        for name, site in targets.activations.items():
            landed = F.as_rows(seen[name].detach()).sort(dim=1).values
            assert landed.equal(site.target.expand_as(landed))

    @everywhere
    def test_a_correction_brings_every_site_closer_to_its_target(self, name):
        model, robust = corrected(name)
        targets = trueup.calibrate(model, images(24).split(8), decide=False)
        before = trueup.measure(model, targets, dark()).distance
        inside = {}
        for site, module in zip(robust.placed_at, robust.placed, strict=True):
            module.register_forward_hook(lambda _m, _i, out, site=site: inside.update({site: out.detach()}))
        robust(dark())
        for k, site in enumerate(targets.activations):
            n = F.as_rows(inside[site]).shape[1]
            after = F.wasserstein(inside[site], targets.activations[site].order_statistics(n).float())
            assert after.mean() < before[:, k].mean(), site

    @pytest.mark.parametrize("name", NORMED)
    def test_evidence_is_heeded_where_there_is_some_and_clean_images_are_left(self, name):
        model, robust = corrected(name, EVIDENCE)
        robust = unfused(robust)  # so that what comes out there is the norm's output, and not a ReLU's
        targets = trueup.calibrate(model, images(24).split(8), decide=False)
        before = trueup.measure(model, targets, dark()).evidence
        inside = {}
        for site, module in zip(robust.placed_at, robust.placed, strict=True):
            module.register_forward_hook(
                lambda m, _i, out, site=site: inside.update({site: out.detach().movedim(m.channel_dim, 1).clone()})
            )
        robust(dark())
        for k, site in enumerate(targets.norms):
            assert targets.norms[site].mean_evidence(inside[site]).mean() < before[:, k].mean(), site
        clean, shifted = (robust(x) - model(x) for x in (images(24), dark(24)))
        assert clean.norm() < 0.7 * shifted.norm()


class TestPortable:
    @every
    def test_another_input_size_works_without_calibrating_again(self, rule):
        model, robust = corrected("resnet", rule)
        x = dark(6)  # unusual at any size, so that a gate is open at both
        enlarged = torch.nn.functional.interpolate(x, size=(48, 40), mode="bilinear", align_corners=False)
        assert robust(enlarged).shape == (6, 10)
        # The same pictures, enlarged: nearly the same distributions, so nearly the same correction of the answer.
        small, large = robust(x) - model(x), robust(enlarged) - model(enlarged)
        assert torch.nn.functional.cosine_similarity(small.flatten(), large.flatten(), dim=0) > 0.9

    @pytest.mark.parametrize("size", [(48, 40), (24, 24), (64, 17)], ids=str)
    @pytest.mark.usefixtures("one_answer_is_enough")
    @pytest.mark.filterwarnings("ignore:calibrate. The model is left as it is")
    def test_evidence_at_another_size_is_close_to_a_calibration_at_that_size(self, size):
        """Textures with as much detail per pixel at any size; shifted, so that there is something to correct."""
        model = make("resnet")
        targets, there = calibrated_at((32, 32)), calibrated_at(size)
        x = 2 * textures(16, size, seed=2) - 1.5
        # Weights are learned from one size, and serve another: what is compared is what both do with the same weights.
        weights = {name: norm.weights for name, norm in targets.norms.items()}
        norms = {name: replace(norm, weights=weights[name]) for name, norm in there.norms.items()}
        there = replace(there, norms=norms)
        tuned = [rule for rule in TUNED_CANDIDATES if rule.tuned and rule.strength == 0.01]
        assert [rule.gated for rule in tuned] == [False, True]
        for rule in (trueup.Evidence(), CANDIDATES[5], *tuned):  # the last three are settings that calibration tries
            robust, wanted = (trueup.correct(model, t, rule) for t in (targets, there))
            assert robust(x).isfinite().all()
            moved = (wanted(x) - model(x)).norm()
            assert moved > 0.2
            assert (robust(x) - wanted(x)).norm() < 0.1 * moved

    @every
    def test_targets_from_full_precision_serve_the_model_in_half(self, rule):
        model = make("resnet")
        targets = trueup.calibrate(model, [images(24)], decide=False)
        wanted = trueup.correct(model, targets, rule)(dark())
        half = trueup.correct(copy.deepcopy(model).bfloat16(), targets, rule)(dark().bfloat16())
        torch.testing.assert_close(half.float(), wanted, atol=0.05, rtol=0.05)


class TestTraining:
    @every
    def test_in_training_mode_it_does_what_the_model_does(self, rule):
        model, robust = corrected("resnet", rule)
        x = dark()
        twin = copy.deepcopy(model).train()
        robust.train()
        torch.manual_seed(5)
        wanted = twin(x)
        torch.manual_seed(5)
        assert robust(x).equal(wanted)  # dropout and batch statistics included
        for key, value in twin.state_dict().items():
            assert robust.state_dict()[key].equal(value), key
        robust.eval()
        assert not robust(x).equal(twin.eval()(x))

    @every
    def test_in_evaluation_mode_gradients_reach_the_images(self, rule):
        _, robust = corrected("resnet", rule)
        x = torch.cat([images(2), dark(2)]).requires_grad_()
        robust(x).square().sum().backward()
        assert x.grad.isfinite().all()
        assert (x.grad.flatten(1).norm(dim=1) > 0).all()

    @every
    def test_forward_mode_derivatives_are_those_of_backward_mode(self, rule):
        _, robust = corrected("resnet", rule)
        x, along = (
            torch.cat([images(2), dark(2)]),
            torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        )
        _, tangent = torch.func.jvp(robust, (x,), (along,))
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(robust(x).square().sum(), x)
        out = robust(x).detach()
        assert tangent.norm() > 0
        torch.testing.assert_close((2 * out * tangent).sum(), (gradient * along).sum(), rtol=1e-3, atol=1e-4)

    @every
    def test_training_through_it_trains_the_model(self, rule):
        model, robust = corrected("resnet", rule)
        before = model.fc.weight.clone()
        optimiser = torch.optim.SGD(robust.parameters(), 0.1)
        robust.train()(images(8)).sum().backward()
        optimiser.step()
        assert not model.fc.weight.equal(before)


def on_compact_and(**others):
    """All rules on a compact network, and some on a transformer, whose channels are last."""
    cases = [pytest.param("compact", rule, atol, id=f"compact-{named(rule)}") for rule, atol in RULES]
    cases += [
        pytest.param("vit", rule, atol, id=f"vit-{named(rule)}") for rule, atol in RULES if others.get(named(rule))
    ]
    return pytest.mark.parametrize(("name", "rule", "atol"), cases)


class TestPlainPyTorch:
    # The gate's, where the compiler chooses how its features lie.
    @pytest.mark.filterwarnings("ignore:torch.searchsorted")
    @on_compact_and(gated=True, sort=True)
    def test_compiled_as_one_graph(self, name, rule, atol):
        _, robust = corrected(name, rule)
        torch._dynamo.reset()
        # Generating C++ takes ten seconds or more, so only where a rule has operators that the others have not.
        generate = name == "compact" and named(rule) in ("sort", "histogram", "gated")
        compiled = torch.compile(robust, fullgraph=True, backend="inductor" if generate else "aot_eager")
        with torch.inference_mode():
            torch.testing.assert_close(compiled(dark()), robust(dark()), atol=atol, rtol=1e-4)

    @pytest.mark.parametrize(("rule", "atol"), [RULES[0], RULES[1], (GATED, 1e-4)], ids=["sort", "histogram", "gated"])
    def test_another_image_size_does_not_compile_again_and_again(self, rule, atol):
        _, robust = corrected("compact", rule)
        torch._dynamo.reset()
        compiled = torch.compile(robust, fullgraph=True, backend="aot_eager")
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=3):
            for size in range(24, 44, 4):
                torch.testing.assert_close(compiled(images(2, size)), robust(images(2, size)), atol=atol, rtol=1e-4)

    @pytest.mark.parametrize("rule", [STRONG, GATED], ids=named)
    def test_another_batch_size_compiles_no_more_often_than_the_models(self, rule):
        def graphs(module):
            compiled = []
            torch._dynamo.reset()
            network = torch.compile(
                module, fullgraph=True, backend=lambda graph, _: compiled.append(1) or graph.forward
            )
            with torch.inference_mode():
                for count in (8, 5, 1, 17):
                    network(dark(count))
            return len(compiled)

        model, robust = corrected("compact", rule)
        assert graphs(robust) == graphs(model)

    @pytest.mark.parametrize(
        ("strict", "rule", "atol"),
        [pytest.param(False, rule, atol, id=f"False-{named(rule)}") for rule, atol in RULES]
        # A strict export takes seconds; "careful" has the operators of "evidence" and "gated".
        + [pytest.param(True, *RULES[0], id="True-sort"), pytest.param(True, CAREFUL, 1e-4, id="True-careful")],
    )
    def test_exported_with_a_free_image_size(self, strict, rule, atol):
        _, robust = corrected("compact", rule)
        free = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        program = torch.export.export(robust, (images(4, 32),), dynamic_shapes={"x": free}, strict=strict)
        for size in (24, 40):
            wanted = robust(images(3, size))
            torch.testing.assert_close(program.module()(images(3, size)), wanted, atol=atol, rtol=1e-4)

    @on_compact_and(sort=True, gated=True)
    @pytest.mark.parametrize("strict", [False, True])
    def test_exported_with_a_free_batch_size(self, name, strict, rule, atol):
        _, robust = corrected(name, rule)
        program = torch.export.export(
            robust, (dark(),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1, max=64)}}, strict=strict
        )
        for count in (1, 5):
            torch.testing.assert_close(program.module()(dark(count)), robust(dark(count)), atol=atol, rtol=1e-4)

    @everywhere_and_all
    def test_copied_pickled_and_saved(self, name, rule):
        _, robust = corrected(name, rule)
        file = io.BytesIO()
        torch.save(robust, file)
        file.seek(0)
        copies = [copy.deepcopy(robust), pickle.loads(pickle.dumps(robust)), torch.load(file, weights_only=False)]
        wanted = robust(dark())
        for other in copies:
            assert other(dark()).equal(wanted)
        with torch.no_grad():
            for parameter in copies[0].parameters():
                parameter.zero_()
        assert robust(dark()).equal(wanted)  # a deep copy has weights of its own
        assert not copies[0](dark()).equal(wanted)

    def test_a_predicate_that_cannot_be_pickled_does_not_get_in_the_way(self):
        model = make("resnet")
        targets = trueup.calibrate(model, [images(8)], decide=False)
        robust = trueup.correct(model, targets, STRONG, select=lambda site: "#" in site.name)
        assert pickle.loads(pickle.dumps(robust))(dark()).equal(robust(dark()))

    @everywhere_and_all
    def test_the_state_dict_is_the_models(self, name, rule):
        model, robust = corrected(name, rule)
        assert list(robust.state_dict()) == list(model.state_dict())
        other = make(name)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        robust.load_state_dict(other.state_dict())
        assert all(value.equal(model.state_dict()[key]) for key, value in other.state_dict().items())
        nested = nn.ModuleDict({"net": robust})
        assert list(nested.state_dict()) == [f"net.{key}" for key in model.state_dict()]
        nested.load_state_dict(nested.state_dict())

    @every
    @pytest.mark.parametrize("name", ["resnet", "mobilenet", "convnext"])
    def test_autocast_inference_mode_and_channels_last_mean_the_same(self, name, rule):
        model, robust = corrected(name, rule)
        wanted = robust(dark())
        with torch.inference_mode():
            assert robust(dark()).equal(wanted)
        last = robust(dark().contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(last, wanted, atol=1e-5, rtol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            cast, plain = robust(dark()).float(), model(dark()).float()
        rounding = (plain - model(dark())).abs().max()  # what autocast does to the model itself
        assert (cast - wanted).abs().max() < 5 * rounding + 1e-2

    def test_casting_does_not_blur_the_targets(self):
        for rule in (STRONG, EVIDENCE, GATED):
            _, robust = corrected("resnet", rule)
            robust.bfloat16()
            kept = {b.dtype for part in (robust.placed, robust.combine) if part for b in part.buffers()}
            assert kept == {torch.float64, torch.float32}  # the second for graphs that are exported

    def test_keyword_arguments_and_signature_are_the_models(self):
        model, robust = corrected("resnet")
        assert inspect.signature(robust.forward) == inspect.signature(model.forward)
        assert robust(x=dark()).equal(robust(dark()))

    @pytest.mark.gpu
    @everywhere_and_all
    def test_cuda_means_the_same(self, name, rule):
        model, robust = corrected(name, rule)
        wanted = robust(dark())
        on_gpu = copy.deepcopy(robust).cuda()
        torch.testing.assert_close(on_gpu(dark().cuda()).cpu(), wanted, atol=1e-3, rtol=1e-3)
        targets = trueup.calibrate(model.cuda(), images(24).split(8), decide=False)
        again = trueup.correct(model, targets, rule)
        torch.testing.assert_close(again(dark().cuda()).cpu(), wanted, atol=1e-3, rtol=1e-3)
