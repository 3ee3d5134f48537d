"""Where files come from: the mirror, the cache, a real HTTP server; only the declared file passes."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data import DataRefusedError
from data.card import DataCard
from data.files import FileSources, fetch, keyed_digest, owner_key
from tests.data.conftest import CardOf, Document
from tests.support.modes import open_to_others, open_umask
from tests.support.refusals import refused_as

CONTENT = b"age,town,answer\n1,Oslo,no\n"
KEY = bytes(32)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word on stderr."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def home_page(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server on this machine, and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture
def sources(tmp_path: Path) -> FileSources:
    """An empty project, mirror and cache."""
    return FileSources(root=tmp_path / "project", mirror=tmp_path / "mirror", cache=tmp_path / "cache")


@pytest.fixture
def remote(table: Document, card_of: CardOf) -> CardOf:
    """The card of a table that is to be had from the given addresses."""

    def make(*urls: str) -> DataCard:
        file = {"urls": list(urls), "sha256": hashlib.sha256(CONTENT).hexdigest()}
        return card_of(table | {"files": {"train": file}})

    return make


def put(path: Path, content: bytes) -> Path:
    """Writes a file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_mirror_comes_first(remote: CardOf, sources: FileSources) -> None:
    assert sources.mirror is not None
    mirrored = put(sources.mirror / "tiny" / "t.csv", CONTENT)
    assert fetch(remote("http://127.0.0.1:1/t.csv"), sources, key=KEY) == {"train": mirrored}


def test_a_wrong_file_in_the_mirror_is_refused_by_name(remote: CardOf, sources: FileSources) -> None:
    assert sources.mirror is not None
    put(sources.mirror / "tiny" / "t.csv", CONTENT[:-1])
    with refused_as("altered_file", DataRefusedError, kind="sha256"):
        fetch(remote("http://127.0.0.1:1/t.csv"), sources, key=KEY)


def test_a_download_is_kept_and_not_repeated(
    remote: CardOf, sources: FileSources, home_page: tuple[str, Path]
) -> None:
    address, folder = home_page
    served = put(folder / "t.csv", CONTENT)
    kept = fetch(remote(f"{address}/t.csv"), sources, key=KEY)["train"]
    assert kept == sources.cache / "tiny" / "t.csv" and kept.read_bytes() == CONTENT
    served.unlink()
    assert fetch(remote(f"{address}/t.csv"), sources, key=KEY)["train"] == kept


def test_a_spoiled_cache_is_fetched_again(
    remote: CardOf, sources: FileSources, home_page: tuple[str, Path]
) -> None:
    address, folder = home_page
    put(folder / "t.csv", CONTENT)
    put(sources.cache / "tiny" / "t.csv", CONTENT[:5])
    assert fetch(remote(f"{address}/t.csv"), sources, key=KEY)["train"].read_bytes() == CONTENT


def test_a_truncated_download_is_refused_and_not_kept(
    remote: CardOf, sources: FileSources, home_page: tuple[str, Path]
) -> None:
    address, folder = home_page
    put(folder / "t.csv", CONTENT[:-3])
    with refused_as("not_fetched", DataRefusedError, name="t.csv") as refusal:
        fetch(remote(f"{address}/t.csv"), sources, key=KEY)
    assert "EPSILONFLOW_DATA_MIRROR" in str(refusal.value) and "\n" not in str(refusal.value)
    assert not list(sources.cache.rglob("*.csv"))


def test_the_next_home_is_tried(remote: CardOf, sources: FileSources, home_page: tuple[str, Path]) -> None:
    address, folder = home_page
    put(folder / "spoiled" / "t.csv", b"")
    put(folder / "good" / "t.csv", CONTENT)
    there = [f"{address}/{place}/t.csv" for place in ("absent", "spoiled", "good")]
    homes = ["http://127.0.0.1:1/t.csv", *there]
    assert fetch(remote(*homes), sources, key=KEY)["train"].read_bytes() == CONTENT
    (folder / "good" / "t.csv").unlink()
    (sources.cache / "tiny" / "t.csv").unlink()
    with refused_as("not_fetched", DataRefusedError, name="t.csv") as refusal:
        fetch(remote(*homes), sources, key=KEY)
    assert [home in fault for home, fault in zip(homes, refusal.value.fields["faults"], strict=True)] == [
        True
    ] * 4


def test_data_sets_may_share_a_folder_and_name_a_file_themselves(
    table: Document, card_of: CardOf, sources: FileSources, home_page: tuple[str, Path]
) -> None:
    address, folder = home_page
    put(folder / "5976042", CONTENT)
    file = {"sha256": hashlib.sha256(CONTENT).hexdigest(), "saved_as": "t.csv"}
    file["urls"] = ["http://127.0.0.1:1/t.csv", f"{address}/5976042"]  # type: ignore[assignment]
    card = card_of(table | {"folder": "shared", "files": {"train": file}})
    kept = fetch(card, sources, key=KEY)["train"]
    assert kept == sources.cache / "shared" / "t.csv" and kept.read_bytes() == CONTENT
    assert sources.mirror is not None
    mirrored = put(sources.mirror / "shared" / "t.csv", CONTENT)
    assert fetch(card, sources, key=KEY)["train"] == mirrored


def test_an_own_file_is_checked(table: Document, card_of: CardOf, sources: FileSources) -> None:
    table["files"]["train"]["sha256"] = hashlib.sha256(CONTENT).hexdigest()
    with refused_as("missing_file", DataRefusedError):
        fetch(card_of(table), sources, key=KEY)
    own = put(sources.root / "tiny.csv", CONTENT)
    assert fetch(card_of(table), sources, key=KEY) == {"train": own}
    put(own, CONTENT + b"2,Rome,yes\n")
    with refused_as("altered_file", DataRefusedError, kind="sha256"):
        fetch(card_of(table), sources, key=KEY)


def test_a_keyed_checksum_says_what_to_write_and_needs_the_key(
    table: Document, card_of: CardOf, sources: FileSources
) -> None:
    own = put(sources.root / "tiny.csv", CONTENT)
    table["files"]["train"] = {"path": "tiny.csv", "keyed_sha256": "0" * 64}
    plain = hashlib.sha256(CONTENT).hexdigest()
    proper = keyed_digest(KEY, [plain]).hex()
    with refused_as("altered_file", DataRefusedError, path=own, checksum=proper) as refusal:
        fetch(card_of(table), sources, key=KEY)
    assert plain not in str(refusal.value)
    table["files"]["train"]["keyed_sha256"] = proper
    assert fetch(card_of(table), sources, key=KEY) == {"train": own}
    with refused_as("altered_file", DataRefusedError, path=own):
        fetch(card_of(table), sources, key=bytes([1]) * 32)


@pytest.mark.parametrize("is_public", [False, True])
def test_a_download_of_private_records_is_for_its_owner_alone(
    remote: Callable[..., DataCard], home_page: tuple[str, Path], sources: FileSources, is_public: bool
) -> None:
    url, served = home_page
    put(served / "tiny.csv", CONTENT)
    card = remote(f"{url}/tiny.csv").model_copy(update={"public": is_public})
    with open_umask():
        found = fetch(card, sources, key=KEY)["train"]
    assert found.read_bytes() == CONTENT and bool(open_to_others(found.parent)) == is_public


def test_the_owner_key_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    with open_umask():
        key = owner_key(tmp_path / "home")
    assert open_to_others(tmp_path / "home") == []
    path = tmp_path / "home" / "owner.key"
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    assert owner_key(tmp_path / "home") == key != owner_key(tmp_path / "other")
    path.write_bytes(key[:5])
    with refused_as("bad_owner_key", DataRefusedError):
        owner_key(tmp_path / "home")


def test_who_loses_the_race_for_the_owner_key_takes_the_winner_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = owner_key(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda self: False)  # looked before the winner wrote
    assert owner_key(tmp_path) == key
    assert list(tmp_path.iterdir()) == [tmp_path / "owner.key"]
