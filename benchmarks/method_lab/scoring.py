"""A model with its rules, fitted and scored."""

from __future__ import annotations

import time
from typing import Any

import torch
from rules import Gated
from sites import Lab
from torch import Tensor, nn

from data import Task


class Bench:
    """One model and its task: scores rules, remembers what the uncorrected model says."""

    def __init__(self, model: nn.Module, task: Task, name: str, batch: int = 500) -> None:
        self.name, self.task, self.batch = name, task, batch
        device = task.calibration.device
        self.lab = Lab(model).to(device)
        self.normalise = task.normalise
        self.keys = list(task.sets)
        held = task.held if len(task.held) else task.calibration  # ImageNet has none to spare
        self.images = torch.cat([s.images for s in task.sets.values()] + [held])
        self.labels = [s.labels for s in task.sets.values()]
        self.lab.use({}, task.calibration[:1])
        self.odds = self.lab.logits(self.images, self.normalise, batch).softmax(1)
        self.plain = self.odds.argmax(1)

    def regret(self, said: Tensor, part: slice) -> float:
        """How much less probable, in percent, the model as it was finds the new answers than its own."""
        odds = self.odds[part]
        chosen = odds.gather(1, said[part, None])[:, 0]
        return 100 * (odds.amax(1) - chosen).mean().item()

    def score(self, rules: dict[str, Any], *, sequential: bool = True) -> dict[str, Any]:
        start = time.time()
        if rules:
            self.lab.use(rules, self.normalise(self.task.calibration), sequential=sequential)
            said = self.lab.logits(self.images, self.normalise, self.batch).argmax(1)
        else:
            said = self.plain
        result: dict[str, Any] = {"sets": {}}
        gate = rules.get("norm")
        if isinstance(gate, Gated):  # how many clean test images lie beyond each level, and of the corrupted
            p, count = torch.cat(gate.seen), len(self.labels[0])
            for level in (1, 5, 20):
                result[f"x{level}"] = 100 * (p[:count] <= level / 100).float().mean().item()
            result["found"] = 100 * (p[count : sum(map(len, self.labels))] <= 0.05).float().mean().item()
        at = 0
        for key, labels in zip(self.keys, self.labels, strict=True):
            part = said[at : at + len(labels)]
            result["sets"][key] = 100 * (part == labels).float().mean().item()
            if key == ("clean", 0):
                result["agree"] = 100 * (part == self.plain[at : at + len(labels)]).float().mean().item()
                result["regret"] = self.regret(said, slice(at, at + len(labels)))
            at += len(labels)
        result["held"] = 100 * (said[at:] == self.plain[at:]).float().mean().item()
        result["held_regret"] = self.regret(said, slice(at, None))
        shifted = {k: v for k, v in result["sets"].items() if k[0] != "clean"}
        result["clean"] = result["sets"][("clean", 0)]
        result["mean"] = sum(shifted.values()) / max(1, len(shifted))
        for level in sorted({k[1] for k in shifted}):
            these = [v for k, v in shifted.items() if k[1] == level]
            result[f"s{level}"] = sum(these) / len(these)
        for c in dict.fromkeys(k[0] for k in shifted):
            these = [v for k, v in shifted.items() if k[0] == c]
            result[c] = sum(these) / len(these)
        result["seconds"] = time.time() - start
        return result
