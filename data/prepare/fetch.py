"""Get the files of a data set: from a path in the project, a mirror folder, or their public URLs."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pooch

from data.prepare.secret_key import keyed
from data.readers.records import files_in
from data.schema.card import DataCard, File
from data.schema.errors import DataRefusedError

RAW = Path("datasets/raw")
Kind: TypeAlias = Literal["sha256", "md5"]
_TIMEOUT_SECONDS = 30
_NAMES: Mapping[Kind, str] = {"sha256": "SHA-256", "md5": "MD5"}


@dataclass(frozen=True)
class Places:
    """Where to look for files.

    root: the project, to which a card's `path` is relative. mirror: folder that is tried before the network; it has a
    folder for each data set, or for several whose cards name the same folder. cache: folder of downloads, organised
    like a mirror.
    """

    root: Path
    mirror: Path | None
    cache: Path


def fetch(card: DataCard, places: Places, *, key: bytes) -> dict[str, Path]:
    """Get every file of the card by its role, and check the declared checksums.

    If there are alternative sets of files, the first one in the mirror is used, or else the first that is available.
    key: the owner key, for files with a keyed checksum. Raises DataRefusedError, which names the file, if one is
    missing, cannot be downloaded or is not the declared one, or if two are the same.
    """
    _check_different(card, key)
    folder = card.folder or card.name
    sets = (card.files, *card.alternatives)
    sets = next(((files,) for files in sets if _is_mirrored(folder, files, places)), sets)
    refusals = []
    for files in sets:
        try:
            return {role: _fetch(folder, file, places, key=key) for role, file in files.items()}
        except DataRefusedError as refusal:
            refusals.append(refusal)
    raise refusals[0]  # of the files that the card names first


def check_local(card: DataCard, root: Path, *, key: bytes | None) -> None:
    """Raise DataRefusedError if a file that the card names by its path is missing or not the declared one.

    root: the project. key: the owner key, or None if there is none yet; then keyed checksums are not compared.
    """
    for file in card.files.values() if not card.alternatives else ():
        if file.path and (key is not None or file.sha256):
            _local(root / file.path, file, key=key or b"")
        elif file.path and not (root / file.path).exists():
            raise _missing(root / file.path)


def checksum_for(path: Path, file: File, *, key: bytes) -> str | None:
    """The line that a card should declare for a file, `keyed_sha256: ...` or `sha256: ...`; None if it is right."""
    plain = _checksum(path, "sha256")
    if file.sha256:
        return None if plain == file.sha256 else f"sha256: {plain}"
    found = keyed(key, [plain]).hex()
    return None if found == file.keyed_sha256 else f"keyed_sha256: {found}"


def _check_different(card: DataCard, key: bytes) -> None:
    """Refuse the same file twice if one checksum is keyed and the other is not; the card itself checks other cases."""
    plain = {keyed(key, [file.sha256]).hex() for file in card.files.values() if file.sha256}
    if plain & {file.keyed_sha256 for file in card.files.values()}:
        raise DataRefusedError(
            f"two files of {card.name!r} are the same, by sha256 and keyed_sha256 in its card, and records to train on"
            " cannot be those to test on; name another file."
        )


def _is_mirrored(folder: str, files: Mapping[str, File], places: Places) -> bool:
    mirror = places.mirror
    return mirror is not None and all(
        not file.path and (mirror / folder / file.name).is_file() for file in files.values()
    )


def _fetch(folder: str, file: File, places: Places, *, key: bytes) -> Path:
    if file.path:
        return _local(places.root / file.path, file, key=key)
    mirrored = places.mirror / folder / file.name if places.mirror else None
    if mirrored and mirrored.is_file():
        return _verified(mirrored, file, "take it away or replace it by the published file")
    return _download(file, places.cache / folder)


def _local(path: Path, file: File, *, key: bytes) -> Path:
    if not path.exists():
        raise _missing(path)
    if file.sha256:
        return _verified(path, file, "restore the file, or update sha256 in its data card if it is right")
    found = keyed(key, [_checksum(path, "sha256")]).hex()
    if found != file.keyed_sha256:
        raise DataRefusedError(
            f"{path} is not the file that keyed_sha256 in its data card declares, by the owner key of this home;"
            f" restore what has changed, or write {found} there if the file is right."
        )
    return path


def _missing(path: Path) -> DataRefusedError:
    return DataRefusedError(f"there is no file {path}; put it there or correct its path in the data card.")


def _verified(path: Path, file: File, advice: str) -> Path:
    kind, declared = _declared(file)
    if _checksum(path, kind) != declared:
        raise DataRefusedError(
            f"{path} is truncated or altered, its {_NAMES[kind]} is not the declared one; {advice}."
        )
    return path


def _declared(file: File) -> tuple[Kind, str]:
    return ("md5", file.md5) if file.md5 else ("sha256", file.sha256 or "")


def _download(file: File, folder: Path) -> Path:
    if not file.urls:
        raise DataRefusedError(f"{file.name} has no public home; {_put_into_a_mirror(file, folder)}.")
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    kind, checksum = _declared(file)
    faults = []
    for url in file.urls:
        try:
            known = f"{kind}:{checksum}"
            return Path(pooch.retrieve(url, known, fname=file.name, path=folder, downloader=downloader))
        except ValueError:
            faults.append(
                f"{url} gave a truncated or altered file (its {_NAMES[kind]} is not the declared one)"
            )
        except OSError as error:
            faults.append(f"{url} could not be read ({type(error).__name__})")
    raise DataRefusedError(
        f"{file.name} could not be fetched: {'; '.join(faults)}; try again, or {_put_into_a_mirror(file, folder)}."
    )


def _put_into_a_mirror(file: File, folder: Path) -> str:
    return (
        f"put it as {folder.name}/{file.name} into a folder and name that folder in EPSILONFLOW_DATA_MIRROR"
    )


def _checksum(path: Path, kind: Kind) -> str:
    """The checksum of a file's bytes, or for a folder of the names and checksums of all its files in the order of
    names.
    """
    if path.is_dir():
        return _checksum_of_folder(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _checksum_of_folder(folder: Path) -> str:
    """A file that cannot be read has an empty checksum, since it becomes a stand-in."""
    found = hashlib.sha256()
    for path in files_in(folder):
        try:
            one = _checksum(path, "sha256") if path.is_file() else ""  # reading a pipe would not end
        except OSError:
            one = ""
        name = os.fsencode(path.relative_to(folder).as_posix())
        found.update(name + b"\0" + one.encode() + b"\n")
    return found.hexdigest()
