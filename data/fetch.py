"""Where the files of a data set come from: a path in the project, a mirror folder, or their public homes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pooch

from data.card import DataCard, File
from data.errors import DataRefused
from data.owner import keyed

RAW = Path("data/raw")
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Places:
    """Where files are looked for.

    root: the project, which a card's `path` starts from. mirror: folder tried before the network, which holds
    a folder for each data set, or for several whose cards name the same. cache: where downloads are kept, laid out
    as a mirror.
    """

    root: Path
    mirror: Path | None
    cache: Path


def fetch(card: DataCard, places: Places, *, key: bytes) -> dict[str, Path]:
    """Every file of the card by its role, each with the declared checksum.

    key: the owner key, for files that are declared by a keyed checksum. Raises DataRefused, naming the file,
    when one is missing, cannot be downloaded or is not the declared one.
    """
    folder = card.folder or card.name
    return {role: _fetch(folder, file, places, key=key) for role, file in card.files.items()}


def _fetch(folder: str, file: File, places: Places, *, key: bytes) -> Path:
    if file.path:
        return _local(places.root / file.path, file, key=key)
    mirrored = places.mirror / folder / file.name if places.mirror else None
    if mirrored and mirrored.is_file():
        return _verified(mirrored, file.sha256, "take it away or replace it by the published file")
    return _download(file, places.cache / folder)


def _local(path: Path, file: File, *, key: bytes) -> Path:
    if not path.is_file():
        raise DataRefused(f"There is no file {path}; put it there or correct its path in the data card.")
    if file.sha256:
        return _verified(
            path, file.sha256, "restore the file, or update sha256 in its data card if it is right"
        )
    found = keyed(key, [_sha256(path)]).hex()
    if found != file.keyed_sha256:
        raise DataRefused(
            f"{path} is not the file that keyed_sha256 in its data card declares; restore it, or write "
            f"{found} there if the file is right."
        )
    return path


def _verified(path: Path, sha256: str | None, advice: str) -> Path:
    if _sha256(path) != sha256:
        raise DataRefused(f"{path} is truncated or altered, its SHA-256 is not the declared one; {advice}.")
    return path


def _download(file: File, folder: Path) -> Path:
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    faults = []
    for url in file.urls:
        try:
            known = f"sha256:{file.sha256}"
            return Path(pooch.retrieve(url, known, fname=file.name, path=folder, downloader=downloader))
        except ValueError:
            faults.append(f"{url} gave a truncated or altered file (its SHA-256 is not the declared one)")
        except OSError as error:
            faults.append(f"{url} could not be read ({type(error).__name__})")
    raise DataRefused(
        f"{file.name} could not be fetched: {'; '.join(faults)}; try again, or put it as "
        f"{folder.name}/{file.name} into a folder and name that folder in EPSILONFLOW_DATA_MIRROR."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
