# SPDX-License-Identifier: Apache-2.0
"""A sample with slime's newer method, and a loopback server with scripted responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokens.sample import Sample


@dataclass(kw_only=True)
class SlimeSample(Sample):
    """Has slime's ``append_response_tokens`` instead of ``update_from_meta_info``, with its checks."""

    appended: list[dict] = field(default_factory=list)
    update_from_meta_info = None

    def append_response_tokens(
        self, args=None, *, tokens=None, log_probs=None, trainable=True, meta_info=None, text=None
    ):
        assert (log_probs is not None) == trainable
        assert (meta_info is not None) == trainable
        self.appended.append({"tokens": tokens, "meta_info": meta_info})
        self.response += text
        self.loss_mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        self.loss_mask = self.loss_mask + [int(trainable)] * len(tokens)
        self.tokens = self.tokens + tokens
        self.response_length += len(tokens)
        log_probs = log_probs if trainable else [0.0] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + log_probs
        assert len(self.rollout_log_probs) == self.response_length
        if meta_info is not None:
            Sample.update_from_meta_info(self, args, meta_info)


@dataclass
class Recorded:
    """Requests that reached a server."""

    port: int
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)


Script = Callable[[int, dict], tuple[int, object]]


@contextmanager
def loopback_server(script: Script, pages: Callable[[str], object] = lambda path: None) -> Iterator[Recorded]:
    """Serve the result of ``script(number of the request, its body)``: a status, and bytes or an object for JSON.

    ``pages`` has the result of a GET by path; None for HTTP 404.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages(self.path)
            body = json.dumps(page).encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.requests.append({"path": self.path, **request})
            recorded.headers.append(dict(self.headers))
            status, answer = script(len(recorded.requests) - 1, request)
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorded = Recorded(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield recorded
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
