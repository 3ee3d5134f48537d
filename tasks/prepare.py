"""Prepare: from a data card to arrays that training maps into memory. Spends nothing."""

from pathlib import Path

from data import PublicDescription, catalogue, prepared, public_description
from data.fetch import RAW, Places, fetch
from data.owner import PUBLIC_KEY, keyed, owner_key
from data.reading import read
from data.scattering import scattered
from tasks.environment import data_mirror, home
from tasks.params import Params, load
from tasks.stage import main_of

READS = ("data",)
PREPARED = Path("data/prepared")


def prepare(
    params: Params,
    *,
    mirror: Path | None,
    home: Path,
    destination: Path,
    root: Path = Path(),
    cards: Path = catalogue.CARDS,
) -> PublicDescription:
    """Fetch, check, encode and write the data set that `params.data.dataset` names; returns its public facts.

    mirror: folder tried before the network. home: where the owner key is. destination: folder to write.
    root: the project, where the paths of own files and the download cache start. cards: folder of the cards.
    Raises DataRefused, before anything is fetched for a transform that the records cannot have, and then leaves
    `destination` as it was.
    """
    transform = params.data.transform
    card = catalogue.card(params.data.dataset, cards)
    public = public_description(card, transform)
    key = PUBLIC_KEY if card.public else owner_key(home)
    files = fetch(card, Places(root=root, mirror=mirror, cache=root / RAW), key=key)
    salt = keyed(key, ["salt of a prepared folder", card.model_dump_json()])
    blocks = read(card, files) if transform == "none" else scattered(card, read(card, files))
    prepared.write(destination, blocks, public, salt=salt, at_most=card.records.at_most)
    return public


def main() -> None:
    """The DVC stage: params.yaml and the environment in, data/prepared out."""
    params = load(Path("params.yaml"), reads=READS)
    prepare(params, mirror=data_mirror(), home=home(), destination=PREPARED)


if __name__ == "__main__":
    main_of(main)
