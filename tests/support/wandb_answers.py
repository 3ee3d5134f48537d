"""What the stand-in for Weights & Biases answers to each GraphQL operation: as little as satisfies the client."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class Known:
    """What the stand-in has been told. runs: by id. committed: ids of artifacts. url: its own."""

    url: str = ""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)

    def upload(self, name: str) -> str:
        """A URL to put a file at."""
        return f"{self.url}/upload/{name}"

    def add_rows(self, run_id: str, rows: list[str], summaries: list[str]) -> None:
        """Keeps what a run that goes on is told of its history."""
        run = self.runs[run_id]
        run["historyLineCount"] += len(rows)
        run["historyTail"] = json.dumps(rows[-1:]) if rows else run["historyTail"]
        run["summaryMetrics"] = [run["summaryMetrics"], *summaries][-1]

    def answer(self, operation: str, variables: Variables) -> dict[str, Any]:
        """The data of the answer; empty for an operation whose answer the client does not need."""
        answer = _ANSWERS.get(operation)
        return {} if answer is None else answer(self, variables)


def artifact_id(asked: Variables) -> str:
    """An artifact with the same name and content is the same one."""
    return f"{asked['artifactCollectionName']}:{asked['digest']}"


def _viewer(known: Known, _: Variables) -> Any:
    return {
        "viewer": {"id": "U", "entity": ENTITY, "username": "x", "flags": "{}", "teams": {"edges": []}},
    }


def _run_status(known: Known, asked: Variables) -> Any:
    return {"model": _PROJECT | {"name": asked["project"], "bucket": known.runs.get(asked["name"])}}


def _upsert_run(known: Known, asked: Variables) -> Any:
    name = asked["name"]
    inserted = name not in known.runs
    run = known.runs.setdefault(name, _EMPTY_RUN | {"id": name, "name": name})
    run["project"] = _PROJECT | {"name": asked["project"]}
    run["displayName"] = asked["displayName"] or run.get("displayName")
    run["config"] = asked["config"] or run["config"]
    return {"upsertBucket": {"bucket": run, "inserted": inserted}}


def _create_files(known: Known, asked: Variables) -> Any:
    files = [{"name": name, "uploadUrl": known.upload(name)} for name in asked["files"]]
    return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}


def _create_artifact(known: Known, asked: Variables) -> Any:
    made = artifact_id(asked["input"])
    state = "COMMITTED" if made in known.committed else "PENDING"
    artifact = {"id": made, "state": state, "artifactSequence": {"latestArtifact": None}}
    return {"createArtifact": {"artifact": artifact}}


def _create_manifest(known: Known, asked: Variables) -> Any:
    file = {"id": "F", "name": asked["name"], "uploadUrl": known.upload("manifest"), "uploadHeaders": []}
    return {"createArtifactManifest": {"artifactManifest": {"id": "M", "file": file}}}


def _create_artifact_files(known: Known, asked: Variables) -> Any:
    edges = [{"node": _file_node(known, file)} for file in asked["input"]["artifactFiles"]]
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def _file_node(known: Known, file: Variables) -> Any:
    name = file["name"]
    node = {"id": name, "name": name, "displayName": name, "storagePath": name, "uploadHeaders": []}
    node |= {"uploadUrl": known.upload(name), "uploadMultipartUrls": None}
    return node | {"artifact": {"id": file["artifactID"]}}


def _commit(known: Known, asked: Variables) -> Any:
    known.committed.add(asked["artifactID"])
    return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": "0"}}}


def _artifact(known: Known, asked: Variables) -> Any:
    name = asked["id"].split(":")[0]
    artifact = {"__typename": "Artifact", "id": asked["id"], "versionIndex": 0, "state": "COMMITTED"}
    sequence = {"__typename": "ArtifactSequence", "name": name, "project": _PROJECT | {"name": "p"}}
    artifact |= {"artifactSequence": sequence, "artifactType": {"name": "model"}, "description": None}
    artifact |= {"metadata": "{}", "ttlDurationSeconds": -2, "ttlIsInherited": True, "tags": [], "size": 1}
    artifact |= {"historyStep": 0, "digest": "0", "commitHash": "0", "fileCount": 1, "aliases": []}
    return {"artifact": artifact | dict.fromkeys(("createdAt", "updatedAt"), "2026-01-01T00:00:00")}


def _linked(known: Known, asked: Variables) -> Any:
    collection = {"__typename": "ArtifactPortfolio", "name": "linked", "project": _PROJECT | {"name": "p"}}
    linked = {"__typename": "ArtifactCollectionMembership", "id": "L", "versionIndex": 0, "aliases": []}
    linked |= _artifact(known, {"id": "linked:0"}) | {"artifactCollection": collection}
    return {"project": {"artifactCollectionMembership": linked | {"createdAt": "2026-01-01T00:00:00"}}}


def _projects(known: Known, _: Variables) -> Any:
    return {"models": {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}}


def _upsert_view(known: Known, asked: Variables) -> Any:
    view = {name: asked[name] for name in ("type", "name", "displayName", "description", "spec")}
    project = {"id": "P", "name": asked["projectName"], "entityName": asked["entityName"]}
    view |= {"id": asked["id"] or "Vmlldzox", "project": project, "updatedAt": None}
    return {"upsertView": {"view": view, "inserted": asked["id"] is None}}


def _organisation(known: Known, asked: Variables) -> Any:
    organisation = {"name": "institute", "orgEntity": {"name": "institute"}}
    return {"entity": {"organization": organisation, "user": None}}


_Answer = Callable[[Known, Variables], Any]
_ANSWERS: dict[str, _Answer] = {
    "Viewer": _viewer,
    "GetDefaultEntity": _viewer,
    "GetProjects": _projects,
    "ProjectInternalId": lambda *_: {"project": _PROJECT},
    "upsertView": _upsert_view,
    "FetchOrgInfoFromEntity": _organisation,
    "LinkArtifact": lambda *_: {"result": {"versionIndex": 0, "artifactMembership": None}},
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
    "ArtifactMembershipByName": _linked,
}
