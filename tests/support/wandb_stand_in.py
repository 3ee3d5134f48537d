"""A stand-in for the servers of Weights & Biases on 127.0.0.1, which keeps all that it is sent.

Its answers are as little as satisfies the client. So it proves that requests are sent, and with what in them; it does
not prove that Weights & Biases accepts them, gives them the meaning that is hoped for, or draws anything.
"""

import gzip
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.wandb_answers import Known, Variables, artifact_id

_STREAMS = ("wandb-history.jsonl", "wandb-summary.json")


@dataclass(frozen=True)
class Request:
    """One request as it came in. body: after decompression."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def operation(self) -> str:
        """The name of a GraphQL operation; empty for another request."""
        if self.path != "/graphql":
            return ""
        found = re.search(r"(?:query|mutation)\s+(\w+)", self.document["query"])
        return found.group(1) if found else ""


@dataclass
class StandIn:
    """The stand-in. hangs: answers nothing. fails: answers 500. refuses: operations that it answers with errors."""

    hangs: bool = False
    fails: bool = False
    refuses: tuple[str, ...] = ()
    requests: list[Request] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    ended: threading.Event = field(default_factory=threading.Event)

    def asked(self, operation: str) -> list[Variables]:
        """The variables of each GraphQL request of this name, in order."""
        found = (request for request in list(self.requests) if request.operation == operation)
        return [request.document.get("variables") or {} for request in found]

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        """The rows of the history of a run, in order."""
        path = re.compile(rf"/files/[^/]+/[^/]+/{re.escape(run_id)}/file_stream")
        streams = (request.document for request in list(self.requests) if path.fullmatch(request.path))
        chunks = (stream.get("files", {}).get("wandb-history.jsonl") for stream in streams)
        return [json.loads(line) for chunk in chunks if chunk for line in chunk["content"]]

    def artifacts(self, run_id: str) -> tuple[set[str], set[str]]:
        """The types of the artifacts that a run used, and of those that it made."""
        names = {artifact_id(asked["input"]): asked["input"] for asked in self.asked("CreateArtifact")}
        logged = {
            artifact_id(a["input"]) for a in self.asked("CreateArtifact") if a["input"]["runName"] == run_id
        }
        used = {
            a["input"]["artifactID"] for a in self.asked("UseArtifact") if a["input"]["runName"] == run_id
        }
        types = {name: asked["artifactTypeName"] for name, asked in names.items()}
        return {types[name] for name in used}, {types[name] for name in logged - used}

    def answer(self, request: Request) -> dict[str, Any]:
        """What the client is told."""
        if request.path.endswith("/file_stream"):
            files = request.document.get("files", {})
            rows, summaries = (files.get(name, {}).get("content", []) for name in _STREAMS)
            self.known.add_rows(request.path.split("/")[-2], rows, summaries)
        if not request.operation:
            return {}
        if request.operation in self.refuses:
            return {"data": None, "errors": [{"message": f"{request.operation} is not allowed"}]}
        return {"data": self.known.answer(request.operation, request.document.get("variables") or {})}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    backend: StandIn

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = Request(self.command, self.path, dict(self.headers), body)
        self.backend.requests.append(request)
        if self.backend.hangs:
            self.backend.ended.wait()
            return
        content = json.dumps(self.backend.answer(request)).encode()
        self.send_response(500 if self.backend.fails else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _handle

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *where: Any) -> None:
        """Says nothing of a client that has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*where)


@contextmanager
def standing_in(
    *, hangs: bool = False, fails: bool = False, refuses: tuple[str, ...] = ()
) -> Iterator[StandIn]:
    """A stand-in on a free port, until the block ends."""
    backend = StandIn(hangs, fails, refuses)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"backend": backend}))
    backend.known.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield backend
    finally:
        backend.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
