"""The code that a checkout names: what its user has chosen, and files from elsewhere may therefore name, too."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from algorithms.extension import is_own
from data.card import DataRefusedError, data_card
from data.documents import Document
from data.formats import Own
from tasks.config.params import EncoderParams, ParamsRefusedError, read_yaml


def named_code(root: Path) -> frozenset[str]:
    """Every `package.module:factory` in params.yaml and the data cards of the checkout at `root`; none elsewhere."""
    names: set[str] = set()
    with suppress(ParamsRefusedError):
        names.update(names_in(read_yaml(root / "params.yaml", holds="groups", missing="")))
    for path in (root / "data" / "cards").glob("*.yaml"):
        if b"factory" not in path.read_bytes():
            continue
        with suppress(DataRefusedError):
            reader = data_card(path.stem, path.parent).reader
            names.update([reader.factory] if isinstance(reader, Own) else [])
    return frozenset(names)


def named_encoder(root: Path) -> EncoderParams | None:
    """The encoder that params.yaml of the checkout at `root` names; None without one."""
    with suppress(ParamsRefusedError, ValidationError):
        data = read_yaml(root / "params.yaml", holds="groups", missing="").get("data")
        chosen = data.get("encoder") if isinstance(data, Mapping) else None
        return None if chosen is None else EncoderParams.model_validate(chosen)
    return None


def names_in(document: Document) -> Iterator[str]:
    """The code that a document in the form of params.yaml names: method, features, model and encoder."""
    data = document.get("data")
    groups = [document.get(group) for group in ("algorithm", "features", "model")]
    for group in (*groups, data.get("encoder") if isinstance(data, Mapping) else None):
        name = group.get("name") if isinstance(group, Mapping) else None
        if isinstance(name, str) and is_own(name):
            yield name
