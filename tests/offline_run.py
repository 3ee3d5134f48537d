"""Logs a synthetic run in a process of its own and reads back the offline file that it leaves."""

import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

from tests.synthetic_run import write_run

ROOT = Path(__file__).parents[1]
LOG = """
import logging, sys
from pathlib import Path
from tasks.groups import Tracking
from tasks.report import report
from tasks.tracking import Finished, log_run
logging.basicConfig()
root, mode = Path(sys.argv[1]), sys.argv[2]
done = report(artifacts=root / "artifacts", prepared=root / "data" / "prepared", root=root)
run = Finished(done.card, done.run.metrics, done.run.trace, done.run.public, done.curve)
print(log_run(run, Tracking(mode=mode), artifacts=root / "artifacts", root=root))
"""


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
    """Logs the run in `root` in a process whose home is empty, and whose whole network is the listener."""
    here = f"http://127.0.0.1:{listener.port}"
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = ours | {
        "HOME": str(root / "home"),
        "MPLCONFIGDIR": str(root / "matplotlib"),
        "PYTHONPATH": str(ROOT),
        "WANDB_BASE_URL": here,
        "WANDB_API_KEY": "0" * 40,
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), here),
    }
    (root / "home").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", LOG, str(root), mode],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass
class Logged:
    """What an offline run left: its folder, its records, what it printed and who was contacted."""

    root: Path
    records: list[Any]
    printed: str
    complaints: str
    connections: int

    def of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]


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


def logged_run(root: Path) -> Logged:
    """Writes a run below `root` and logs it offline."""
    write_run(root, steps=30)
    with listening() as listener:
        printed, complaints = start(root, "offline", listener).communicate(timeout=120)
    files = [path for path in root.rglob("run-*.wandb") if path.is_file()]
    assert len(files) == 1, (printed, complaints)
    content = files[0].read_bytes()
    return Logged(root, list(read_records(content)), printed, complaints, listener.connections)
