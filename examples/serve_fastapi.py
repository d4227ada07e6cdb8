"""Serve a corrected model with FastAPI, and its monitor behind /metrics.

    pip install trueup fastapi uvicorn
    python examples/serve_fastapi.py my_models:load model.trueup.safetensors --port 8000

    curl -X POST --data-binary @image.npy http://127.0.0.1:8000/answer    # {"class": 3, "p": 0.42}
    curl http://127.0.0.1:8000/metrics                                    # for Prometheus
    curl http://127.0.0.1:8000/drift                                      # the drift test, in words too

`my_models:load` is a function that returns the model. An image is the body of a request: a NumPy file (.npy) of one
input as the model takes it, without the batch. With several worker processes, give --folder: each writes its snapshot
there, and /metrics shows the sum of all.
"""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from torch import nn

import trueup
from trueup.cli.loading import load_model
from trueup.monitor import CONTENT_TYPE, Snapshot, merged, prometheus_text

LARGEST = 64 << 20  # bytes of a request


def make_app(model: nn.Module, targets: trueup.Targets, *, folder: Path | None = None) -> FastAPI:
    """The application: one corrected model, one monitor."""
    robust = trueup.correct(model, targets, report=True)
    monitor = trueup.Monitor(robust)
    app = FastAPI(title="A corrected model")

    @torch.inference_mode()
    def answer_of(image: torch.Tensor) -> dict[str, Any]:
        scores, report = robust(image[None])
        monitor.update(report)
        return {"class": int(scores[0].argmax()), "p": round(float(report["p"][0]), 6)}

    def snapshot() -> Snapshot:
        """Snapshot of this worker, or the sum of all workers'."""
        mine = monitor.snapshot()
        if folder is None:
            return mine
        mine.save(folder / f"{os.getpid()}.json")
        return merged(*sorted(folder.glob("*.json")))

    @app.post("/answer")
    async def answer(request: Request) -> dict[str, Any]:
        body = await request.body()
        if len(body) > LARGEST:
            raise HTTPException(413, "the image is too large")
        try:
            image = torch.tensor(np.load(io.BytesIO(body), allow_pickle=False), dtype=torch.float32)
            return await run_in_threadpool(answer_of, image)
        except (ValueError, EOFError, RuntimeError) as error:
            raise HTTPException(422, f"not an input of this model: {error}") from error

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus_text(snapshot()), media_type=CONTENT_TYPE)

    @app.get("/drift")
    def drift() -> dict[str, Any]:
        seen = snapshot()
        return {
            "drifted": seen.drifted,
            "since": None if seen.since is None else seen.since.isoformat(),
            "false_alarm_probability": seen.false_alarm_probability,
            "says": str(seen),
        }

    return app


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="package.module:function that returns the model")
    parser.add_argument("targets", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, help="where workers share their snapshots")
    asked = parser.parse_args()
    app = make_app(load_model(asked.model).model, trueup.Targets.load(asked.targets), folder=asked.folder)
    uvicorn.run(app, host=asked.host, port=asked.port)


if __name__ == "__main__":
    main()
