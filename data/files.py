"""The files of a data set, from a path in the project, a mirror or the network; whole writes, locks, the owner key.

The owner key is one secret per machine, so that nothing about private files can be guessed from what is published.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data.card import DataCard, DataRefusedError, File
from data.documents import Document
from data.readers.records import check_is_of_the_path, files_in

RAW = Path("datasets/raw")
_TIMEOUT_SECONDS = 30
KEY_BYTES = 32
OWNER_KEY = "owner.key"
"""The key's file in the home."""
OWNER_PUB = "owner.pub"
"""The file in the home with the public half of the signing key, which is derived from the owner key."""
PUBLIC_KEY = bytes(KEY_BYTES)
"""Used instead of the secret for public records, so that prepared data have the same checksum on every machine."""


def read_json(path: Path) -> Document:
    """The object in a JSON file."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def write_whole(
    path: Path,
    content: Callable[[Path], object],
    *,
    mode: int = 0o666,
    put: Callable[[Path, Path], object] = os.replace,
) -> None:
    """Write a file through a temporary file next to it, so that a crash leaves the old file, the new one or none.

    content: writes the temporary file. mode: of the file, before the umask. put: moves the file to its place.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        content(fresh)
        # Before the move: a crash after it could otherwise leave the name with less than the content.
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        put(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a text file whole; see `write_whole`."""
    write_whole(path, lambda fresh: fresh.write_text(text, encoding="utf-8"), mode=mode)


def hide(path: Path) -> None:
    """Make a file, or a folder with all that is in it, accessible to its owner only. Links are left alone."""
    for each in (path, *path.rglob("*")):
        mode = each.lstat().st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode):
            each.chmod(stat.S_IMODE(mode) & 0o700)


def try_lock(path: Path) -> int | None:
    """Lock a file and return a descriptor that holds the lock until it is closed; None if another process has locked or
    deleted the file.

    This is for a lock file that is deleted with its folder; `filelock`, which is used elsewhere, would create the
    folder again. Raises FileNotFoundError if the folder does not exist.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file may have been deleted and made anew since it was opened.
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    if not is_there:
        os.close(descriptor)
        return None
    return descriptor


def owner_key(home: Path) -> bytes:
    """The 32 secret bytes in `home`/owner.key, created at first use and readable by the owner only.

    Raises DataRefusedError if the file is not a key, or was lost: with another key, what was charged before is another
    run, and what was trained on before are other records.
    """
    path, signed = home / OWNER_KEY, home / OWNER_PUB
    if not path.exists():
        if signed.exists():
            raise DataRefusedError(
                "{path} is gone, with which runs were charged here; restore it, or move {signed} away for a new one.",
                code="bad_owner_key",
                path=path,
                signed=signed,
            )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # linked into place, so that one of two processes wins
            fresh = secrets.token_bytes(KEY_BYTES)
            write_whole(path, lambda file: file.write_bytes(fresh), mode=0o600, put=os.link)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise DataRefusedError(
            "{path} is not an owner key of {size} bytes; restore it, or move it and {signed} away for a new one.",
            code="bad_owner_key",
            path=path,
            size=KEY_BYTES,
            signed=signed,
        )
    return key


def public_key(home: Path) -> str | None:
    """The public half of a home's key; None if no card was ever signed there."""
    path = home / OWNER_PUB
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def keyed_digest(key: bytes, words: Iterable[str]) -> bytes:
    """32 bytes that only a holder of `key` can derive from `words` (HMAC-SHA256, RFC 2104)."""
    return hmac.digest(key, "\n".join(words).encode(), "sha256")


@dataclass(frozen=True)
class FileSources:
    """Where to look for files.

    root: the project, to which a card's `path` is relative. mirror: folder that is tried before the network; it has a
    folder for each data set, or for several whose cards name the same folder. cache: folder of downloads, organised
    like a mirror.
    """

    root: Path
    mirror: Path | None
    cache: Path


def fetch(card: DataCard, sources: FileSources, *, key: bytes) -> dict[str, Path]:
    """Get every file of the card by its role, and check the declared checksums.

    If there are alternative sets of files, the first one in the mirror is used, or else the first that is available.
    key: the owner key, for files with a keyed checksum. Raises DataRefusedError, which names the file, if one is
    missing, cannot be downloaded or is not the declared one, or if two are the same.
    """
    # The card itself compares checksums of one kind.
    plain = {keyed_digest(key, [file.sha256]).hex() for file in card.files.values() if file.sha256}
    if plain & {file.keyed_sha256 for file in card.files.values()}:
        raise DataRefusedError(
            "two files of {dataset!r} are the same, by sha256 and keyed_sha256 in its card, and records to train on"
            " cannot be those to test on; name another file.",
            code="bad_card",
            dataset=card.name,
            keys=("files",),
        )
    folder, mirror = card.folder or card.name, sources.mirror
    sets = (card.files, *card.alternatives)
    if mirror is not None:
        sets = next(((files,) for files in sets if _is_mirrored(files, mirror / folder)), sets)
    refusals = []
    for files in sets:
        try:
            return {role: _fetch(folder, file, sources, key=key) for role, file in files.items()}
        except DataRefusedError as refusal:
            refusals.append(refusal)
        finally:
            if not card.public and (sources.cache / folder).is_dir():
                hide(sources.cache / folder)
    raise refusals[0]  # of the files that the card names first


def check_local(card: DataCard, root: Path, *, key: bytes | None) -> None:
    """Raise DataRefusedError if a file that the card names by its path is missing or not the declared one.

    root: the project. key: the owner key, or None if there is none yet; then keyed checksums are not compared.
    """
    for file in card.files.values() if not card.alternatives else ():
        if file.path:
            _local(root / file.path, file, key=key)


def checksum_for(path: Path, file: File, *, key: bytes) -> str | None:
    """The line that a card should declare for a file, `keyed_sha256: ...` or `sha256: ...`; None if it is right."""
    plain = _checksum(path)
    if file.sha256:
        return None if plain == file.sha256 else f"sha256: {plain}"
    keyed_checksum = keyed_digest(key, [plain]).hex()
    return None if keyed_checksum == file.keyed_sha256 else f"keyed_sha256: {keyed_checksum}"


def _is_mirrored(files: Mapping[str, File], folder: Path) -> bool:
    return all(not file.path and (folder / file.name).is_file() for file in files.values())


def _fetch(folder: str, file: File, sources: FileSources, *, key: bytes) -> Path:
    if file.path:
        return _local(sources.root / file.path, file, key=key)
    mirrored = sources.mirror / folder / file.name if sources.mirror else None
    if mirrored and mirrored.is_file():
        return _verify_checksum(mirrored, file, "take it away or replace it by the published file")
    return _download(file, sources.cache / folder)


def _local(path: Path, file: File, *, key: bytes | None) -> Path:
    if not path.exists():
        raise DataRefusedError(
            "there is no file {path}; put it there or correct its path in the data card.",
            code="missing_file",
            path=path,
        )
    if file.sha256:
        return _verify_checksum(
            path, file, "restore the file, or update sha256 in its data card if it is right"
        )
    if key is not None and (checksum := keyed_digest(key, [_checksum(path)]).hex()) != file.keyed_sha256:
        raise DataRefusedError(
            "{path} is not the file that keyed_sha256 in its data card declares, by the owner key of this home;"
            " restore what has changed, or write {checksum} there if the file is right.",
            code="altered_file",
            path=path,
            checksum=checksum,
        )
    return path


def _verify_checksum(path: Path, file: File, advice: str) -> Path:
    kind, declared = file.published_checksum
    if _checksum(path, kind) != declared:
        raise DataRefusedError(
            "{path} is truncated or altered, its {kind} is not the declared one; {advice}.",
            code="altered_file",
            path=path,
            kind=kind,
            advice=advice,
        )
    return path


def _download(file: File, folder: Path) -> Path:
    in_a_mirror = (
        f"put it as {folder.name}/{file.name} into a folder and name that folder in EPSILONFLOW_DATA_MIRROR"
    )
    if not file.urls:
        raise DataRefusedError(
            "{name} has no public home; {in_a_mirror}.",
            code="not_fetched",
            name=file.name,
            in_a_mirror=in_a_mirror,
        )
    import pooch  # a twelfth of a second, and only downloads need it

    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    kind, checksum = file.published_checksum
    faults = []
    for url in file.urls:
        try:
            checksum_spec = f"{kind}:{checksum}"
            return Path(
                pooch.retrieve(url, checksum_spec, fname=file.name, path=folder, downloader=downloader)
            )
        except ValueError:
            faults.append(f"{url} gave a truncated or altered file (its {kind} is not the declared one)")
        except OSError as error:
            faults.append(f"{url} could not be read ({type(error).__name__})")
    raise DataRefusedError(
        "{name} could not be fetched: {all_faults}; try again, or {in_a_mirror}.",
        code="not_fetched",
        name=file.name,
        faults=tuple(faults),
        all_faults="; ".join(faults),
        in_a_mirror=in_a_mirror,
    )


def _checksum(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file's bytes, or for a folder of the names and checksums of all its files in the order of
    names.

    In a folder, a file that cannot be read has an empty checksum, since it becomes a stand-in.
    """
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, kind).hexdigest()
    digest = hashlib.sha256()
    for inside in files_in(path):
        checksum = ""
        try:
            if inside.is_file():  # reading a pipe would not end
                checksum = _checksum(inside)
        except OSError as error:
            check_is_of_the_path(error)
        digest.update(os.fsencode(inside.relative_to(path).as_posix()) + b"\0" + checksum.encode() + b"\n")
    return digest.hexdigest()
