"""Tracks a synthetic run in a process of its own and reads back the offline files that it leaves."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from wandb.proto import wandb_internal_pb2

from algorithms.privacy.card import build
from tests.support.synthetic_run import record, write_run
from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
CONFIG = {
    "run_id", "dataset", "algorithm", "population", "public_records", "unit", "adjacency", "target_epsilon", "delta",
    "accountant", "composition", "steps",
    "noise_multiplier", "sampling_rate", "divisor", "private", "noise_is_secret",
    "settings/expected_batch_size", "settings/steps", "settings/update/learning_rate", "settings/update/schedule",
    "model/name", "model/parameters", "model/seed", "model/precision", "model/settings", "model/start", "model/files",
    "model/reinitialize", "model/frozen", "model/augmentations",
}  # fmt: skip
HISTORY = {
    "privacy/step", "privacy/epsilon", "privacy/epsilon_so_far", "privacy/noise_std/gradient",
    "privacy/noise_multiplier/gradient", "privacy/noise_std/total", "privacy/noise_multiplier/total",
}  # fmt: skip
SUMMARY = {
    "test/accuracy",
    "test/loss",
    "privacy/epsilon_total",
    "privacy/delta",
    "privacy/private",
    "test/held_out",
}
LIVE = {"live/step", "live/epsilon_so_far", "live/noise_std"}
LIVE_CONFIG = {"run_id", "algorithm", "dataset", "steps", "delta", "target_epsilon"}
DESCRIPTION = {
    "dataset", "title", "source", "licence", "public", "unit", "population", "cap_epsilon", "cap_delta", "records",
    "input_shape", "classes", "test_records", "holdout", "feature_norms", "tokens", "transform", "composition",
    "composition_order", "blocks_per_person", "blocks", "holdout_rule", "blocks_by",
}  # fmt: skip
"""Every key that W&B is sent of a run, written out: what is new, a training loss say, has to be let in by hand."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


@dataclass
class Listener:
    """A server that counts who connects to it and hangs up."""

    port: int
    connections: int = 0


@contextmanager
def listening() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Listener(server.getsockname()[1])

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                listener.connections += 1
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def start(root: Path, mode: str, listener: Listener) -> "subprocess.Popen[str]":
    """Tracks the run in `root` in a process whose home is empty, and whose whole network is the listener."""
    here = f"http://127.0.0.1:{listener.port}"
    return track(root, mode, here, dict.fromkeys(_PROXIES, here))


def track(
    root: Path, mode: str, url: str, own: Mapping[str, str], module: str = "tracked_run"
) -> "subprocess.Popen[str]":
    """Tracks the run in `root` in a process of its own. url: of W&B. own: of its environment. module: what tracks."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = ours | {
        "HOME": str(root / "home"),
        "MPLCONFIGDIR": str(root / "matplotlib"),
        "PYTHONPATH": str(ROOT),
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,
        **own,
    }
    (root / "home").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{module}", str(root), mode],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Logged:
    """What tracking left offline: its folder, the records of each run by job type, what it said and to whom."""

    root: Path
    runs: dict[str, list[Any]]
    found: list[Any]
    complaints: str
    connections: int

    def of(self, kind: str, job_type: str = "train") -> list[Any]:
        """The records of a kind in the run of a job type."""
        records = self.runs[job_type]
        return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def read_records(content: bytes) -> Iterator[Any]:
    """The records of an offline file: 7 bytes of header, then blocks of 32768 bytes."""
    assert content.startswith(b":W&B")
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        checksum, length, kind = struct.unpack("<IHB", content[position : position + 7])
        body = content[position + 7 : position + 7 + length]
        assert zlib.crc32(bytes([kind]) + body) == checksum
        position += 7 + length
        parts = body if kind in (1, 2) else parts + body
        if kind in (1, 4):
            yield vars(wandb_internal_pb2)["Record"].FromString(parts)


def keys_of(document: Any, prefix: str = "") -> set[str]:
    """The keys of a document as paths, but those of W&B itself; a value that is no document has that of its place."""
    if not isinstance(document, dict) or not document:
        return {prefix} - {""}
    below = [keys_of(value, f"{prefix}/{key}" if prefix else key) for key, value in document.items()]
    return {path for paths in below for path in paths if not path.startswith("_")}


def write_finished(root: Path) -> Path:
    """Writes a finished run below `root`, with its card and as a model that serves; returns the model's folder."""
    folders = write_run(root, steps=30)
    card = build(record(folders), Ed25519PrivateKey.from_private_bytes(bytes(32)))
    (folders.artifacts / "privacy_card.json").write_bytes(card.to_bytes())
    entry = root / "models" / card.evidence.run_id
    shutil.copytree(folders.artifacts, entry)
    return entry


def logged_run(root: Path) -> Logged:
    """Writes a run below `root` and tracks it offline."""
    write_finished(root)
    with listening() as listener:
        printed, complaints = start(root, "offline", listener).communicate(timeout=HANG_SECONDS)
    assert printed, complaints
    files = [path for path in sorted(root.rglob("run-*.wandb")) if path.is_file()]
    contents = [list(read_records(path.read_bytes())) for path in files]
    runs = {next(r.run.job_type for r in records if r.HasField("run")): records for records in contents}
    assert len(runs) == len(files)
    return Logged(root, runs, json.loads(printed), complaints, listener.connections)
