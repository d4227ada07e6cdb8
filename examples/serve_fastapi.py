"""Serve a corrected model with FastAPI, and its monitor behind /metrics.

    pip install trueup fastapi uvicorn
    python examples/serve_fastapi.py my_models:load model.trueup.safetensors --port 8000

    curl -X POST --data-binary @image.npy http://127.0.0.1:8000/answer    # {"class": 3, "p": 0.42}
    curl http://127.0.0.1:8000/metrics                                    # for Prometheus
    curl http://127.0.0.1:8000/drift                                      # the drift test, in words too

`my_models:load` is a function that returns the model. An image is the body of a request: a NumPy file (.npy) of one
input as the model takes it, without the batch.

With --workers 4, four processes answer. Each shares its snapshot with the others in a folder that only this run of the
server knows, and /metrics shows the sum of all. A worker that ends leaves its snapshot there, so that counters never
fall; the folder is deleted at the end. (If something else starts your processes, let it make an empty folder at each
start, and give that to `make_app`.) Containers do not share a folder: Prometheus reads each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
SHARED_EVERY = 5.0  # seconds after which a worker shares its snapshot again
SETTINGS = "TRUEUP_SERVE"  # environment variable that tells workers what to serve


def make_app(model: nn.Module, targets: trueup.Targets, *, folder: Path | None = None) -> FastAPI:
    """The application: one corrected model, one monitor."""
    robust = trueup.correct(model, targets, report=True)
    monitor, saving = trueup.Monitor(robust), threading.Lock()

    @asynccontextmanager
    async def sharing(_app: FastAPI) -> AsyncIterator[None]:
        """Share this worker's snapshot while it runs, and when it ends."""

        async def keep_sharing() -> None:
            while True:
                await run_in_threadpool(snapshot)
                await asyncio.sleep(SHARED_EVERY)

        task = asyncio.create_task(keep_sharing())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        snapshot()

    app = FastAPI(title="A corrected model", lifespan=None if folder is None else sharing)

    @torch.inference_mode()
    def answer_of(image: torch.Tensor) -> dict[str, Any]:
        scores, report = robust(image[None])
        monitor.update(report)
        return {"class": int(scores[0].argmax()), "p": round(float(report["p"][0]), 6)}

    def snapshot() -> Snapshot:
        """Snapshot of this worker, or the sum of all workers'."""
        if folder is None:
            return monitor.snapshot()
        with saving:  # a later snapshot must not be overwritten by an earlier one
            monitor.snapshot().save(folder / f"{monitor.stream}.json")
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


def worker_app() -> FastAPI:
    """The application of one worker process."""
    model, targets, folder = json.loads(os.environ[SETTINGS])
    return make_app(load_model(model).model, trueup.Targets.load(targets), folder=Path(folder))


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="package.module:function that returns the model")
    parser.add_argument("targets", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1, help="number of processes that answer")
    asked = parser.parse_args()
    if asked.workers == 1:
        app = make_app(load_model(asked.model).model, trueup.Targets.load(asked.targets))
        uvicorn.run(app, host=asked.host, port=asked.port)
        return
    with tempfile.TemporaryDirectory(prefix="trueup-") as folder:
        os.environ[SETTINGS] = json.dumps([asked.model, str(asked.targets), folder])
        here = Path(__file__)
        uvicorn.run(
            f"{here.stem}:worker_app",
            factory=True,
            app_dir=str(here.parent),
            workers=asked.workers,
            host=asked.host,
            port=asked.port,
        )


if __name__ == "__main__":
    main()
