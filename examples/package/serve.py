"""A server on a package, with batches made of requests that come together, and weights that change under load.

    python serve.py model.flam --port 8000
    curl --data-binary @x.npy localhost:8000/forward -o y.npy             # rows of one input, rows of one result
    curl --data-binary @weights.safetensors localhost:8000/weights

Needs NumPy and flambeau; neither torch nor a compiler.
"""

from __future__ import annotations

import argparse
import io
import queue
import tempfile
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import flambeau
from flambeau.package.module import Module


class Batches:
    """One thread runs what has come in since it looked last, as one call."""

    def __init__(self, module: Module, most: int) -> None:
        self.module, self.most = module, most
        self.waiting: queue.Queue[tuple[np.ndarray, Future[np.ndarray]]] = queue.Queue()
        threading.Thread(target=self.work, daemon=True).start()

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        answer: Future[np.ndarray] = Future()
        self.waiting.put((rows, answer))
        return answer.result()

    def work(self) -> None:
        while True:
            batch = [self.waiting.get()]
            while sum(len(x) for x, _ in batch) < self.most and not self.waiting.empty():
                batch.append(self.waiting.get())
            try:
                made = self.module.forward(np.concatenate([x for x, _ in batch]))
                for (_, answer), part in zip(batch, np.split(made, np.cumsum([len(x) for x, _ in batch])[:-1])):
                    answer.set_result(part)
            except Exception as error:  # each of them is told
                for _, answer in batch:
                    answer.set_exception(error)


def server(path: str, port: int, most: int = 64) -> ThreadingHTTPServer:
    module = flambeau.load(path)
    batches = Batches(module, most)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            out = io.BytesIO()
            try:
                if self.path == "/weights":
                    with tempfile.NamedTemporaryFile() as file:
                        file.write(body)
                        file.flush()
                        module.update_weights(file.name)
                else:
                    np.save(out, batches(np.load(io.BytesIO(body))))
                self.send_response(200)
            except (flambeau.Error, ValueError) as error:
                out.write(str(error).encode())
                self.send_response(400)
            self.end_headers()
            self.wfile.write(out.getvalue())

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    server(given.package, given.port).serve_forever()
