"""The prepare stage: turn the files of a data card into arrays that training maps into memory. Spends nothing.

Encoders in params.yaml and readers in a data card may be named by package.module:factory.
"""

import hashlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from algorithms.errors import ModelRefusedError
from algorithms.extension import check_allowed, import_factory, is_own, source_digest
from algorithms.stated_names import without_folders
from data import DatasetInfo, dataset_info, prepared
from data.card import CARDS, DataCard, DataRefusedError, data_card
from data.description import EncoderFacts
from data.files import PUBLIC_KEY, RAW, FileSources, fetch, keyed_digest, owner_key
from data.formats import Format, Own
from data.preparation import Preparation
from data.readers.records import OwnReader, RecordChunk
from data.targets import Tags, Target
from data.transforms import encode_records, scatter
from tasks.config import data_mirror, database_url, first_checkout, home, params
from tasks.config.own_code import named_encoder
from tasks.config.params import Params, load
from tasks.runs.checkout import find_checkout
from tasks.runs.stage_main import main_of

if TYPE_CHECKING:
    from algorithms.encoders import Encoder
    from algorithms.encoders.encoder import Encode
    from data.reading import Database

READS = ("data",)
_LOG = logging.getLogger(__name__)
_EVERY_SECONDS = 5.0
PREPARED = Path("datasets/prepared")


def info_of(card: DataCard, chosen: params.DataParams) -> DatasetInfo:
    """The public description of a card's records as they will be prepared.

    Raises DataRefusedError for a transform that the records cannot have, ModelRefusedError for a missing encoder.
    """
    encoder = None if chosen.encoder is None else facts_of(chosen.encoder)
    reader_of(card.reader)
    info = dataset_info(card, chosen.transform, encoder)
    info.check_reader()
    return info


def reader_of(reader: Format | None) -> OwnReader | None:
    """The function of the user's own reader; None for a built-in reader.

    Raises NotUsableError if the reader is missing, DataRefusedError if its source is not the declared one.
    """
    if not isinstance(reader, Own):
        return None
    if (digest := source_digest(reader.factory)) != reader.source_sha256:
        raise DataRefusedError(
            "the source of the reader {name!r} is not the one that source_sha256 declares, so records could"
            " be read otherwise than they were; restore it, or write {digest} into the data card if it is right.",
            code="altered_file",
            name=reader.factory,
            digest=digest,
        )
    own_reader: OwnReader = import_factory(reader.factory, "a reader")(dict(reader.settings))
    return lambda files: _refuse_errors(own_reader, files, reader.factory)


def _refuse_errors(own_reader: OwnReader, files: Mapping[str, Path], factory: str) -> Iterator[RecordChunk]:
    """The blocks of the user's own reader, whose errors become a refusal without their messages."""
    try:
        yield from own_reader(files)
    except DataRefusedError:
        raise
    except Exception as error:
        folder = Path(sys.modules[factory.partition(":")[0]].__file__ or "").parent
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if folder in Path(frame.filename).parents]
        where = (
            f" in line {own_frames[-1].lineno} of {Path(own_frames[-1].filename).name}" if own_frames else ""
        )
        raise DataRefusedError(
            "the reader {name!r} raised {error}{where}; its message is not shown, as it may hold a"
            " value of a record: try the reader on made-up files.",
            code="code_failed",
            name=factory,
            error=type(error).__name__,
            where=where,
        ) from None


def encoder_of(chosen: params.EncoderParams) -> "Encoder":
    """The named encoder, without its weights.

    Raises ModelRefusedError if it is not available, and ParamsRefusedError for settings that do not fit.
    """
    from algorithms.encoders import EncoderSettings, encoder  # here, since torch takes seconds to import

    try:
        settings = EncoderSettings.model_validate(chosen.settings)
    except ValidationError as error:
        raise params.bad_keys("params.yaml", error, "data.encoder.settings") from None
    return encoder(chosen.name, settings, checkpoint=chosen.checkpoint)


def loader_of(
    chosen: params.EncoderParams, target: Target | None, *, tried_on: Sequence[int] | None = None
) -> Callable[[], "Encode"]:
    """The function that loads the named encoder's weights. If words are tagged, it must be a tokenizer.

    tried_on: the shape of made-up records on which the loaded encoder is tried, alone and together. Raises
    ModelRefusedError for another encoder.
    """
    encoder = encoder_of(chosen)
    load = encoder.aligned if isinstance(target, Tags) else encoder.load
    if load is None:
        raise ModelRefusedError(
            "{name!r} does not say which tokens a word has; name tokenizer/NAME.",
            code="encoder_unfit",
            name=chosen.name,
        )
    if tried_on is None:
        return load

    def load_checked() -> "Encode":
        from algorithms.encoders.independence import check_encoder_is_independent

        encode = load()
        check_encoder_is_independent(encoder, encode, tried_on, is_own=is_own(chosen.name))
        return encode

    return load_checked


def encoder_of_model(
    preparation: Preparation | None, *, allow_code: Collection[str] = ()
) -> params.EncoderParams | None:
    """The encoder whose output a model was trained on, if any.

    allow_code: encoders of the user's own that the model's file may name; NotUsableError is raised for others. Raises
    ModelRefusedError if it is not available, or has other weights.
    """
    if preparation is None or not preparation.encoder:
        return None
    carried = dict(preparation.encoder)
    expected = carried.pop("sha256")
    chosen = params.EncoderParams.model_validate(carried)
    check_allowed(chosen.name, allow_code, "the model's file")
    named_here = named_encoder(find_checkout() or Path())
    if named_here is not None and without_local_folders(named_here) == without_local_folders(chosen):
        chosen = named_here  # params.yaml says in which folder it is
    if encoder_of(chosen).sha256 != expected:
        raise ModelRefusedError(
            "the encoder {name!r} here has other weights than the one that the model was trained behind, whose"
            " checksum is {expected}; install that one.",
            code="encoder_unfit",
            name=chosen.name,
            expected=expected,
        )
    return chosen


def without_local_folders(chosen: params.EncoderParams) -> params.EncoderParams:
    """The encoder as a card and a model's file state it: without the folders of this machine."""
    library, _, name = chosen.name.partition("/")
    return chosen.model_copy(
        update={
            "name": f"{library}/{without_folders(name)}" if name else chosen.name,
            "checkpoint": None if chosen.checkpoint is None else without_folders(chosen.checkpoint),
        }
    )


def facts_of(chosen: params.EncoderParams) -> EncoderFacts:
    """The public facts of the named encoder."""
    encoder = encoder_of(chosen)
    settings = json.dumps(chosen.settings, sort_keys=True)
    return EncoderFacts(
        without_local_folders(chosen).name,
        encoder.takes,
        encoder.width,
        encoder.sha256,
        encoder.pretrained_on,
        settings,
        encoder.tokens,
        encoder.padding,
    )


def prepare(
    params: Params,
    *,
    mirror: Path | None,
    home: Path,
    destination: Path,
    root: Path = Path(),
    cards: Path = CARDS,
) -> DatasetInfo:
    """Fetch, check, encode and write the data set that `params.data.dataset` names; returns its public facts.

    mirror: folder that is tried before the network. home: folder of the owner key. destination: folder to write.
    root: the project, to which paths of own files and the download cache are relative. cards: folder of the cards.
    Raises DataRefusedError and then leaves `destination` unchanged; a transform that the records cannot have is refused
    before anything is fetched.
    """
    from data.reading import Digests, read, read_blocks, snapshot, word_list

    transform = params.data.transform
    card = data_card(params.data.dataset, cards)
    info = info_of(card, params.data)
    # Blocks and their rows, as of one moment.
    with snapshot(card, database_url(card.blocks)) as database, ExitStack() as until_written:
        info = replace(info, blocks=chosen_blocks(card, params.data.blocks, root=root, database=database))
        key = PUBLIC_KEY if card.public else owner_key(home)
        files = fetch(card, FileSources(root=root, mirror=mirror, cache=root / RAW), key=key)
        words = ["salt of a prepared folder", card.model_dump_json()]
        digests = Digests(card.population, key=key)
        as_texts = info.encoder is not None and info.encoder.takes == "texts"
        if card.blocks is None:
            records = read(card, files, key=key, own_reader=reader_of(card.reader), as_texts=as_texts)
        else:
            # The card has no checksum of the blocks' content, so the salt depends on the content.
            blocks = read_blocks(
                card,
                info.blocks,
                files,
                root=root,
                url=database,
                digests=digests,
                key=key,
                as_texts=as_texts,
            )
            records = _append_digest(blocks, words)
        if transform == "scattering":
            records = scatter(card, records)
        vocabulary, encoder = None if info.encoder else word_list(card, files), params.data.encoder
        encoder_settings = None
        if info.encoder is not None and encoder is not None:
            encoder_settings = without_local_folders(encoder).model_dump() | {"sha256": info.encoder.sha256}
            records = encode_records(
                records,
                info.encoder,
                loader_of(encoder, info.target, tried_on=card.input_shape),
                info.label_type,
                folder=until_written.enter_context(prepared.portions_of(destination)),
                say=_progress_logger(card),
            )
        prepared.write(
            destination,
            records,
            info,
            salt=lambda: keyed_digest(key, words),
            at_most=card.records.at_most,
            digests=digests.by_block,
            words=vocabulary,
            preparation=Preparation.from_card(card, transform, vocabulary, encoder=encoder_settings),
        )
    return info


def _progress_logger(card: DataCard) -> Callable[[int], object]:
    """A function that logs the progress of encoding, if the number of records to encode is public."""
    declared = card.records
    counts_people = card.person is not None and card.person.rows_per_user is not None
    if declared.train is None or declared.test is None or counts_people:
        return lambda _: None
    return _ProgressLogger(declared.train + declared.test)


class _ProgressLogger:
    """Logs how many of `total` records are done, at most once in a while, and the last."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._last_line = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last_line >= _EVERY_SECONDS or done == self._total:
            self._last_line = now
            left = (now - self._began) * (self._total - done) / done
            _LOG.info("encoded %d of %d records, %.0f s left", done, self._total, left)


def chosen_blocks(
    card: DataCard, named: Sequence[str], *, root: Path, database: "Database" = None
) -> tuple[str, ...]:
    """The blocks to read, sorted: those named, or all blocks if none is named; none for a card without blocks.

    database: a snapshot in which they are read later; by default the database is opened for this. Raises
    DataRefusedError if a named block does not exist, or there are no blocks.
    """
    if card.blocks is None and not named:
        return ()
    from data.reading import block_names  # here, since it imports readers, and few data sets have blocks

    there_are = block_names(card, root=root, url=database or database_url(card.blocks))
    missing = [name for name in named if name not in there_are]
    if missing or not there_are:
        what = f"no block {missing[0]!r}" if missing else "no blocks"
        raise DataRefusedError(
            "{dataset!r} has {what}; choose among those that there are, or wait for one.",
            code="no_blocks",
            dataset=card.name,
            what=what,
        )
    return tuple(name for name in there_are if not named or name in named)


def _append_digest(records: Iterable[RecordChunk], words: list[str]) -> Iterator[RecordChunk]:
    """Pass the records on, and at the end append a digest of all of them to `words`."""
    digest = hashlib.sha256()
    for block in records:
        digest.update(block.part.encode())
        block.records.add_to(digest)
        yield block
    words.append(digest.hexdigest())


def main() -> None:
    """The DVC stage: params.yaml and the environment in, datasets/prepared out."""
    params = load(Path("params.yaml"), reads=READS)
    prepare(
        params,
        mirror=data_mirror(),
        home=home(),
        destination=PREPARED,
        root=first_checkout(Path()),  # DVC's copies of a checkout have no files that git ignores
        cards=Path("data/cards").absolute(),
    )


if __name__ == "__main__":
    main_of(main)
