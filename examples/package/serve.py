"""A web server for a package: requests that arrive together run as one batch, and weights can change under load.

    pip install starlette uvicorn
    python serve.py model.flam --port 8000
    curl --data-binary @x.npy localhost:8000/forward -o y.npy             # rows of one input, rows of one result
    curl --data-binary @weights.safetensors localhost:8000/weights

The machine that serves needs neither torch nor a compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import flambeau
from flambeau.package.module import Module


class Batches:
    """Runs all requests that are waiting as one call, of at most `most` rows unless one request has more."""

    def __init__(self, module: Module, most: int) -> None:
        self.module, self.most = module, most
        self.waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue()

    async def __call__(self, rows: np.ndarray) -> np.ndarray:
        result = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((rows, result))
        return await result

    async def work(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            while sum(len(rows) for rows, _ in batch) < self.most and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            # Requests whose rows differ in shape or dtype cannot run together, and one that fails must fail alone.
            kinds = {(rows.shape[1:], rows.dtype) for rows, _ in batch}
            for part in ([batch] if len(kinds) == 1 else [[one] for one in batch]):
                await asyncio.to_thread(self.run, part, asyncio.get_running_loop())

    def run(self, batch: list[tuple[np.ndarray, asyncio.Future[np.ndarray]]], loop: asyncio.AbstractEventLoop) -> None:
        try:
            made = self.module.forward(np.concatenate([rows for rows, _ in batch]))
            parts = np.split(made, np.cumsum([len(rows) for rows, _ in batch])[:-1])
            for (_, result), rows in zip(batch, parts):
                loop.call_soon_threadsafe(result.set_result, rows)
        except Exception as error:
            for _, result in batch:
                loop.call_soon_threadsafe(result.set_exception, error)


def application(path: str, most: int = 64) -> Starlette:
    module = flambeau.load(path)
    batches = Batches(module, most)

    async def forward(request: Request) -> Response:
        out = io.BytesIO()
        try:
            np.save(out, await batches(np.atleast_1d(np.load(io.BytesIO(await request.body())))))
        except (flambeau.Error, ValueError) as error:
            return PlainTextResponse(str(error), 400)
        return Response(out.getvalue())

    async def weights(request: Request) -> Response:
        with tempfile.NamedTemporaryFile() as file:
            file.write(await request.body())
            file.flush()
            try:
                await asyncio.to_thread(module.update_weights, file.name)
            except (flambeau.Error, ValueError) as error:
                return PlainTextResponse(str(error), 400)
        return Response()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker = asyncio.create_task(batches.work())
        yield
        worker.cancel()

    routes = [Route("/forward", forward, methods=["POST"]), Route("/weights", weights, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(application(given.package), port=given.port)
