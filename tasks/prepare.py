"""The prepare stage: turn the files of a data card into arrays that training maps into memory. Spends nothing."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from data import PublicDescription, prepared
from data.card import CARDS, DataCard, DataRefusedError, data_card
from data.files import PUBLIC_KEY, RAW, Places, fetch, keyed, owner_key
from data.readers.records import Block
from data.reading import Digests, block_names, read, read_blocks, word_list
from data.transforms import encoded, scattered
from data.unseen import preparation_of
from tasks.config.environment import data_mirror, database_url, home
from tasks.config.params import Params, load
from tasks.runs.encoders import loader_of, public_of, reader_of
from tasks.runs.stages import main_of

READS = ("data",)
_LOG = logging.getLogger(__name__)
_EVERY_SECONDS = 5.0
PREPARED = Path("datasets/prepared")
CACHE = Path(".dvc/cache")
"""DVC's cache, unless it was configured elsewhere, for example to be shared."""


def prepare(
    params: Params,
    *,
    mirror: Path | None,
    home: Path,
    destination: Path,
    root: Path = Path(),
    cards: Path = CARDS,
) -> PublicDescription:
    """Fetch, check, encode and write the data set that `params.data.dataset` names; returns its public facts.

    mirror: folder that is tried before the network. home: folder of the owner key. destination: folder to write.
    root: the project, to which paths of own files and the download cache are relative. cards: folder of the cards.
    Raises DataRefusedError and then leaves `destination` unchanged; a transform that the records cannot have is refused
    before anything is fetched.
    """
    transform = params.data.transform
    card = data_card(params.data.dataset, cards)
    public = public_of(card, params.data)
    public = replace(public, blocks=chosen_blocks(card, params.data.blocks, root=root))
    key = PUBLIC_KEY if card.public else owner_key(home)
    files = fetch(card, Places(root=root, mirror=mirror, cache=root / RAW), key=key)
    words = ["salt of a prepared folder", card.model_dump_json()]
    digests = Digests(card.population, key=key)
    as_texts = public.encoder is not None and public.encoder.takes == "texts"
    if card.blocks is None:
        records = read(card, files, key=key, own=reader_of(card.reader), as_texts=as_texts)
    else:
        # The card has no checksum of the blocks' content, so the salt depends on the content.
        url = database_url(card.blocks)
        found = read_blocks(
            card, public.blocks, files, root=root, url=url, digests=digests, key=key, as_texts=as_texts
        )
        records = _noted(found, words)
    if transform == "scattering":
        records = scattered(card, records)
    listed, encoder = None if public.encoder else word_list(card, files), params.data.encoder
    carried = None
    if public.encoder is not None and encoder is not None:
        carried = encoder.model_dump() | {"sha256": public.encoder.sha256}
        records = encoded(
            records,
            public.encoder,
            loader_of(encoder, public.target),
            public.known,
            kept=destination.with_name(f".{destination.name}-encoding"),
            say=_told(card),
        )
    prepared.write(
        destination,
        records,
        public,
        salt=lambda: keyed(key, words),
        at_most=card.records.at_most,
        digests=digests.by_block,
        words=listed,
        preparation=preparation_of(card, transform, listed, encoder=carried),
    )
    return public


def _told(card: DataCard) -> Callable[[int], object]:
    """A function that logs the progress of encoding, if the number of records to encode is public."""
    declared, begun = card.records, time.monotonic()
    counts_people = card.person is not None and card.person.pooled is not None
    if declared.train is None or declared.test is None or counts_people:
        return lambda _: None
    whole, said = declared.train + declared.test, begun

    def say(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _EVERY_SECONDS or done == whole:
            said = now
            _LOG.info(
                "encoded %d of %d records, %.0f s left", done, whole, (now - begun) * (whole - done) / done
            )

    return say


def chosen_blocks(card: DataCard, named: Sequence[str], *, root: Path) -> tuple[str, ...]:
    """The blocks to read, sorted: those named, or all blocks if none is named; none for a card without blocks.

    Raises DataRefusedError if a named block does not exist, or there are no blocks.
    """
    if card.blocks is None and not named:
        return ()
    there_are = block_names(card, root=root, url=database_url(card.blocks))
    missing = [name for name in named if name not in there_are]
    if missing or not there_are:
        what = f"no block {missing[0]!r}" if missing else "no blocks"
        raise DataRefusedError(
            f"{card.name!r} has {what}; choose among those that there are, or wait for one."
        )
    return tuple(name for name in there_are if not named or name in named)


def _noted(records: Iterable[Block], words: list[str]) -> Iterator[Block]:
    """Pass the records on, and at the end append a digest of all of them to `words`."""
    digest = hashlib.sha256()
    for block in records:
        digest.update(block.part.encode())
        block.records.add_to(digest)
        yield block
    words.append(digest.hexdigest())


def hide(cache: Path) -> None:
    """Make DVC's cache accessible to its owner only, since everybody may read the copies of the records in it."""
    if cache.parent.is_dir():
        cache.mkdir(exist_ok=True)
        cache.chmod(0o700)


def main() -> None:
    """The DVC stage: params.yaml and the environment in, datasets/prepared out."""
    params = load(Path("params.yaml"), reads=READS)
    public = prepare(
        params, mirror=data_mirror(), home=home(), destination=PREPARED, cards=Path("data/cards").absolute()
    )
    if not public.public:
        hide(CACHE)


if __name__ == "__main__":
    main_of(main)
