"""Training of many models at once on one device: same network and recipe, different seeds.

A ResNet-20's step is some hundred kernels that are too small to fill a large GPU. So on CUDA each model has its own
stream, and its whole step (batch, forward, backward, update) is one CUDA graph without input from the host: everything
that changes from step to step is in tensors that the step itself updates. An epoch replays the graphs in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup_lab.data.images import Images, Normalisation
from trueup_lab.models.weights import COUNTER, weights_of
from trueup_lab.training.augment import Draws, Mixing, crop_and_mirror, draw_epoch, draw_mixing, mix_and_blank
from trueup_lab.training.engine import Engine
from trueup_lab.training.optimiser import make_optimiser
from trueup_lab.training.recipes import Recipe, learning_rate

Loss = Callable[..., tuple[Tensor, Tensor]]


class Fleet:
    """One model per seed, built by `build` and trained on `data` with `recipe`."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        seeds: Sequence[int],
        data: Images,
        normalisation: Normalisation,
        recipe: Recipe,
        engine: Engine,
    ) -> None:
        self.recipe = recipe
        self.engine = engine
        self.steps = len(data) // recipe.batch
        if self.steps == 0:
            raise ValueError(
                f"{len(data)} training images are fewer than a batch of {recipe.batch}; choose a smaller batch"
            )
        on_device = data.to(engine.device)
        with _backends(engine):
            loss = _compiled(engine)
            self.trainees = [
                Trainee(_seeded(build, seed), seed, on_device, normalisation, recipe, engine, loss) for seed in seeds
            ]
            if engine.graphs:
                count = engine.streams or len(seeds)
                streams = [torch.cuda.Stream(engine.device) for _ in range(count)]  # type: ignore[no-untyped-call]
                for k, trainee in enumerate(self.trainees):
                    trainee.capture(streams[k % len(streams)])

    def train_epoch(
        self, epoch: int, *, steps: int | None = None, watch: Callable[[int], None] = lambda _: None
    ) -> list[tuple[float, float]]:
        """Train all models for `epoch` (from 0), or its first `steps`. Return each one's mean loss and accuracy.

        `watch` is called before each step with the number of steps done, and may raise.
        """
        steps = self.steps if steps is None else min(steps, self.steps)
        for trainee in self.trainees:
            trainee.begin_epoch(epoch)
        with _backends(self.engine):
            for done in range(steps):
                watch(done)
                for trainee in self.trainees:
                    trainee.step()
        return [trainee.end_epoch(steps) for trainee in self.trainees]


class Trainee:
    """One model in training. All tensors of a step keep their addresses, as a CUDA graph requires."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        data: Images,
        normalisation: Normalisation,
        recipe: Recipe,
        engine: Engine,
        loss: Loss,
    ) -> None:
        self.seed = seed
        self.recipe = recipe
        self.engine = engine
        self.data = data
        self.model = model.to(engine.device).train()
        if engine.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for module in self.model.modules():
            if hasattr(module, COUNTER):
                module.num_batches_tracked = None  # type: ignore[assignment]
            if isinstance(module, nn.GroupNorm | nn.LayerNorm):
                module.register_forward_hook(_keep_type)
        self._loss = loss
        self._scale, self._shift = normalisation.affine(engine.device)
        self._steps = len(data) // recipe.batch
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

        draws, mixing = self._draw(0)
        self._draws = Draws(*(t.to(engine.device) for t in draws))
        self._mixing = None if mixing is None else Mixing(*(t.to(engine.device) for t in mixing))
        self._rates = torch.zeros(self._steps, device=engine.device)
        self._within = torch.arange(recipe.batch, device=engine.device)
        self._step = torch.zeros((), dtype=torch.int64, device=engine.device)
        self._loss_sum = torch.zeros((), device=engine.device)
        self._right = torch.zeros((), dtype=torch.int64, device=engine.device)
        self._rate = torch.zeros((), device=engine.device)
        self._optimiser, self._optimiser_state = make_optimiser(
            self.model, recipe, self._rate, capturable=engine.graphs
        )

    def step(self) -> None:
        """Do one training step, by replaying the graph if there is one."""
        if self._graph is None:
            self._eager_step()
            return
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def begin_epoch(self, epoch: int) -> None:
        """Draw the epoch's batches and set its learning rates."""
        recipe = self.recipe
        draws, mixing = self._draw(epoch)
        rates = torch.tensor([learning_rate(recipe, epoch, k, self._steps) for k in range(self._steps)])
        ours = (*self._draws, *(self._mixing or ()), self._rates)
        with self._on_stream():
            for tensor, drawn in zip(ours, (*draws, *(mixing or ()), rates), strict=True):
                tensor.copy_(drawn)
            for counter in (self._step, self._loss_sum, self._right):
                counter.zero_()

    def end_epoch(self, steps: int) -> tuple[float, float]:
        """Wait for the last of `steps`. Return their mean loss and accuracy."""
        with self._on_stream():
            loss, right = float(self._loss_sum), int(self._right)
        return loss / steps, right / (steps * self.recipe.batch * self.data.labels[0].numel())

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture the step as a graph on `stream`. The model is restored afterwards."""
        self._stream = stream
        before = {key: value.clone() for key, value in self.state().items()}
        stream.wait_stream(torch.cuda.current_stream(self.engine.device))
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets libraries allocate their workspaces
                self._eager_step()
                self._step.zero_()
            self._optimiser.zero_grad(set_to_none=True)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._eager_step()
        self.load_state(before)

    def state(self) -> dict[str, Tensor]:
        """Return everything that later steps depend on, by name: weights, running statistics, optimiser state."""
        return {f"weights/{key}": value for key, value in weights_of(self.model).items()} | self._optimiser_state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that `state` returned."""
        with torch.no_grad(), self._on_stream():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])
        if self._stream is not None:
            self._stream.synchronize()

    def _eager_step(self) -> None:
        where = self._step * self.recipe.batch + self._within
        loss, right = self._loss(
            self.model,
            self.data.images,
            self.data.labels,
            Draws(*(drawn[where] for drawn in self._draws)),
            None if self._mixing is None else Mixing(*(drawn[where] for drawn in self._mixing)),
            self._scale,
            self._shift,
            self.recipe.crop_padding,
            self.recipe.label_smoothing,
            self.engine,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self._rate.copy_(self._rates.take(self._step))  # indexing with [...] would wait for the device
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._loss_sum += loss.detach()
        self._right += right
        self._step += 1

    def _draw(self, epoch: int) -> tuple[Draws, Mixing | None]:
        recipe, (height, width) = self.recipe, self.data.images.shape[2:]
        used = self._steps * recipe.batch
        draws = draw_epoch(
            self.seed, epoch, len(self.data), used=used, padding=recipe.crop_padding, mirror=recipe.mirror
        )
        if not (recipe.mixing or recipe.erasing):
            return draws, None
        return draws, draw_mixing(
            self.seed, epoch, used=used, size=(height, width), mixing=recipe.mixing, erasing=recipe.erasing
        )

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield


def _batch_loss(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    mixing: Mixing | None,
    scale: Tensor,
    shift: Tensor,
    padding: int,
    smoothing: float,
    engine: Engine,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the drawn, augmented and normalised images, and the number classified right."""
    batch = images[draws.order]
    if padding:
        batch = crop_and_mirror(batch, draws.shift, draws.mirror, padding)
    x = batch * scale + shift
    own = None
    if mixing is not None:
        x, own = mix_and_blank(x, mixing)
    if engine.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=engine.precision == "bfloat16"):
        logits = model(x)
    target = labels[draws.order].long()
    logits = logits.float()
    right = (logits.detach().argmax(1) == target).sum()
    if own is None:
        return F.cross_entropy(logits, target, label_smoothing=smoothing), right
    ours, other = (
        F.cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="none")
        for wanted in (target, target.roll(1))
    )
    return (own * ours + (1 - own) * other).mean(), right


def _compiled(engine: Engine) -> Loss:
    if engine.compile == "none":
        return _batch_loss
    # Imported here because the compiler takes seconds to import.
    from torch._inductor import list_mode_options

    # With filter response norm, fusing row reductions with column reductions fails an assertion (torch 2.11).
    options: dict[str, Any] = {"triton.mix_order_reduction": False}
    if engine.combo:
        options["combo_kernels"] = True
    if engine.compile != "default":
        options |= list_mode_options(engine.compile)
    # Parameters are inputs of the compiled code, so that one compilation serves all models.
    return torch.compile(_batch_loss, fullgraph=True, dynamic=False, options=options)


@contextmanager
def _backends(engine: Engine) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    with cudnn.flags(enabled=True, benchmark=engine.autotune, deterministic=not engine.autotune, allow_tf32=False):
        yield


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _keep_type(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return the output in the input's type: autocast leaves it in float32, which doubles the memory traffic."""
    return output.type_as(inputs[0])
