"""Calibration, and what is chosen, under torchrun: every rank gets what all ranks' data make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trueup
from architectures import images, make

SCRIPT = """
import sys, torch
from torch import distributed
from architectures import images, make
import trueup

distributed.init_process_group("gloo")
rank, idle = distributed.get_rank(), sys.argv[2] == "idle"
shard = images(24)[rank::2] if not idle else images(24)[: 24 * (rank == 0)]
targets = trueup.calibrate(make("vgg"), shard.split(5))
targets.save(f"{sys.argv[1]}/{rank}.safetensors")
model = make("resnet")
known, new = trueup.calibrate(model, [images(24)]), images(60, seed=5)
mine = new[: 60 * (rank == 0)] if idle else new[: 10] if rank else new[10:]
strong = trueup.Evidence(budget=1, strength=0.9, base=0.9)
rule = trueup.choose(model, known, mine.split(7), 0.2, strong, answer=lambda output: (50 * output[:, 0]).round())
open(f"{sys.argv[1]}/{rank}.rule", "w").write(repr(rule))
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("share", ["half", "idle"], ids=["half each", "one rank without data"])
def test_two_processes_calibrate_and_choose_as_one_does(tmp_path, share):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    source = Path(trueup.__file__).parents[1]
    subprocess.run(
        [*torchrun, str(script), str(tmp_path), share],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{source}", "OMP_NUM_THREADS": "1"},
    )
    whole = trueup.calibrate(make("vgg"), [images(24)])
    for rank in (0, 1):
        merged = trueup.Targets.load(tmp_path / f"{rank}.safetensors")
        assert merged.images == 24
        assert merged.sampled.equal(whole.sampled)
        for name in whole:
            torch.testing.assert_close(merged[name].target, whole[name].target, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(merged[name].sample, whole[name].sample, atol=1e-5, rtol=1e-5)
    model, strong = make("resnet"), trueup.Evidence(budget=1, strength=0.9, base=0.9)
    known = trueup.calibrate(model, [images(24)])

    def chosen(few):
        return trueup.choose(model, known, [few], 0.2, strong, answer=lambda output: (50 * output[:, 0]).round())

    new = images(60, seed=5)
    assert len({chosen(new), chosen(new[:10]), chosen(new[10:])}) > 1
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.rule").read_text() == repr(chosen(new))
