"""A stand-in for the servers of Weights & Biases on 127.0.0.1, which keeps all that it is sent.

Its answers are as little as satisfies the client. So it proves that requests are sent, and with what in them; it does
not prove that Weights & Biases accepts them, gives them the meaning that is hoped for, or draws anything.
"""

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "researchers"
_PROJECT = {"id": "UHJvamVjdA==", "internalId": "1", "entity": {"id": "E", "name": ENTITY}}
_EMPTY_RUN = {
    "config": "{}",
    "summaryMetrics": "{}",
    "historyTail": "[]",
    "eventsTail": "[]",
    "historyLineCount": 0,
    "eventsLineCount": 0,
    "logLineCount": 0,
    "wandbConfig": '{"t": {}}',  # a run that has begun
    "tags": [],
    "notes": "",
    "description": None,
    "sweepName": None,
}
Variables = dict[str, Any]


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
    """The stand-in. hangs: takes requests and answers none. refuses: operations that it answers with an error."""

    hangs: bool = False
    refuses: tuple[str, ...] = ()
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

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
        names = {_id_of(asked["input"]): asked["input"] for asked in self.asked("CreateArtifact")}
        logged = {_id_of(a["input"]) for a in self.asked("CreateArtifact") if a["input"]["runName"] == run_id}
        used = {
            a["input"]["artifactID"] for a in self.asked("UseArtifact") if a["input"]["runName"] == run_id
        }
        types = {name: asked["artifactTypeName"] for name, asked in names.items()}
        return {types[name] for name in used}, {types[name] for name in logged - used}

    def answer(self, request: Request) -> dict[str, Any]:
        """What the client is told."""
        if "file_stream" in request.path:
            self._count_rows(request)
        if not request.operation:
            return {}
        if request.operation in self.refuses:
            return {"errors": [{"message": f"{request.operation} is not allowed"}], "data": None}
        variables = request.document.get("variables") or {}
        return {"data": _ANSWERS.get(request.operation, lambda *_: {})(self, variables)}

    def _count_rows(self, request: Request) -> None:
        run = self.runs[request.path.split("/")[-2]]
        files = request.document.get("files", {})
        rows = files.get("wandb-history.jsonl", {}).get("content", [])
        run["historyLineCount"] += len(rows)
        run["historyTail"] = json.dumps(rows[-1:]) if rows else run["historyTail"]
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run["summaryMetrics"] = line

    def upload(self, name: str) -> str:
        """A URL to put a file at."""
        return f"{self.url}/upload/{name}"


def _id_of(asked: Variables) -> str:
    return f"{asked['artifactCollectionName']}:{asked['digest']}"


def _viewer(backend: StandIn, _: Variables) -> Any:
    return {
        "viewer": {"id": "U", "entity": ENTITY, "username": "x", "flags": "{}", "teams": {"edges": []}},
    }


def _run_status(backend: StandIn, asked: Variables) -> Any:
    return {"model": _PROJECT | {"name": asked["project"], "bucket": backend.runs.get(asked["name"])}}


def _upsert_run(backend: StandIn, asked: Variables) -> Any:
    name = asked["name"]
    inserted = name not in backend.runs
    run = backend.runs.setdefault(name, _EMPTY_RUN | {"id": name, "name": name})
    run["project"] = _PROJECT | {"name": asked["project"]}
    run["displayName"] = asked["displayName"] or run.get("displayName")
    run["config"] = asked["config"] or run["config"]
    return {"upsertBucket": {"bucket": run, "inserted": inserted}}


def _create_files(backend: StandIn, asked: Variables) -> Any:
    files = [{"name": name, "uploadUrl": backend.upload(name)} for name in asked["files"]]
    return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}


def _create_artifact(backend: StandIn, asked: Variables) -> Any:
    made = _id_of(asked["input"])
    state = "COMMITTED" if made in backend.committed else "PENDING"
    artifact = {"id": made, "state": state, "artifactSequence": {"latestArtifact": None}}
    return {"createArtifact": {"artifact": artifact}}


def _create_manifest(backend: StandIn, asked: Variables) -> Any:
    file = {"id": "F", "name": asked["name"], "uploadUrl": backend.upload("manifest"), "uploadHeaders": []}
    return {"createArtifactManifest": {"artifactManifest": {"id": "M", "file": file}}}


def _create_artifact_files(backend: StandIn, asked: Variables) -> Any:
    edges = [{"node": _file_node(backend, file)} for file in asked["input"]["artifactFiles"]]
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def _file_node(backend: StandIn, file: Variables) -> Any:
    name = file["name"]
    node = {"id": name, "name": name, "displayName": name, "storagePath": name, "uploadHeaders": []}
    node |= {"uploadUrl": backend.upload(name), "uploadMultipartUrls": None}
    return node | {"artifact": {"id": file["artifactID"]}}


def _commit(backend: StandIn, asked: Variables) -> Any:
    backend.committed.add(asked["artifactID"])
    return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": "0"}}}


def _artifact(backend: StandIn, asked: Variables) -> Any:
    name = asked["id"].split(":")[0]
    artifact = {"__typename": "Artifact", "id": asked["id"], "versionIndex": 0, "state": "COMMITTED"}
    sequence = {"__typename": "ArtifactSequence", "name": name, "project": _PROJECT | {"name": "p"}}
    artifact |= {"artifactSequence": sequence, "artifactType": {"name": "model"}, "description": None}
    artifact |= {"metadata": "{}", "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": [], "size": 1}
    artifact |= {"historyStep": 0, "digest": "0", "commitHash": "0", "fileCount": 1, "aliases": []}
    return {"artifact": artifact | dict.fromkeys(("createdAt", "updatedAt"), "2026-01-01T00:00:00")}


def _projects(backend: StandIn, _: Variables) -> Any:
    return {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}}


def _upsert_view(backend: StandIn, asked: Variables) -> Any:
    view = {name: asked[name] for name in ("type", "name", "displayName", "description", "spec")}
    project = {"id": "P", "name": asked["projectName"], "entityName": asked["entityName"]}
    view |= {"id": asked["id"] or "Vmlldzox", "project": project, "updatedAt": None}
    return {"upsertView": {"view": view, "inserted": asked["id"] is None}}


def _organisation(backend: StandIn, asked: Variables) -> Any:
    organisation = {"name": "institute", "orgEntity": {"name": "institute"}}
    return {"entity": {"organization": organisation, "user": None}}


_Answer = Callable[[StandIn, Variables], Any]
_ANSWERS: dict[str, _Answer] = {
    "Viewer": _viewer,
    "GetDefaultEntity": _viewer,
    "GetProjects": _projects,
    "ProjectInternalId": lambda *_: {"project": _PROJECT},
    "upsertView": _upsert_view,
    "FetchOrgInfoFromEntity": _organisation,
    "LinkArtifact": lambda *_: {"linkArtifact": {"versionIndex": 0, "artifactMembership": None}},
    "ServerFeaturesQuery": lambda *_: {"serverInfo": {"features": []}},
    "RunResumeStatus": _run_status,
    "UpsertBucket": _upsert_run,
    "CreateRunFiles": _create_files,
    "ArtifactType": lambda *_: {"project": {"artifact": None}},
    "CreateArtifact": _create_artifact,
    "CreateArtifactManifest": _create_manifest,
    "CreateArtifactFiles": _create_artifact_files,
    "CommitArtifact": _commit,
    "UseArtifact": lambda _, v: {
        "useArtifact": {"artifact": {"id": v["input"]["artifactID"], "digest": "0"}}
    },
    "ArtifactByID": _artifact,
}


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
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _handle

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def standing_in(*, hangs: bool = False, refuses: tuple[str, ...] = ()) -> Iterator[StandIn]:
    """A stand-in on a free port, until the block ends."""
    backend = StandIn(hangs, refuses)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"backend": backend}))
    server.daemon_threads = True
    backend.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield backend
    finally:
        backend.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
