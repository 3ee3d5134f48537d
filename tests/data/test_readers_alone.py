"""What the shipped readers make of a record is the same with all others as by itself, on made-up files."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from data.formats import Cifar, Csv, Datasets, Images, ImageTable, Parquet, Texts
from data.readers import encoding, images, rows, texts
from data.targets import Classes

CLASSES = Classes(classes=("no", "yes"))
COLUMNS = (
    {"name": "x", "kind": "numeric", "bounds": [0, 10], "missing": 3},
    {"name": "b", "kind": "binned", "edges": [1, 5]},
    {"name": "c", "kind": "categorical", "categories": ["a", "b"]},
    {"name": "y", "kind": "label"},
)
ROWS = [(place % 11, place % 7, "abz"[place % 3], ("no", "yes")[place % 2]) for place in range(30)]
Make = Callable[[Path, list[int]], list[bytes]]


def frame(chosen: list[int]) -> pd.DataFrame:
    return pd.DataFrame([ROWS[place] for place in chosen], columns=["x", "b", "c", "y"])


def table(folder: Path, chosen: list[int], form: str) -> list[bytes]:
    path = folder / f"t.{form}"
    frame(chosen).to_csv(path, index=False) if form == "csv" else frame(chosen).to_parquet(path)
    kinds: dict[str, Any] = {"csv": Csv, "parquet": Parquet}
    declared = kinds[form].model_validate_json(json.dumps({"kind": form, "columns": COLUMNS}))
    found = [encoding.features(some, declared, "t") for some in rows.tables("train", path, declared, CLASSES)]
    return [row.tobytes() for row in np.concatenate(found)]


def rows_of_texts(folder: Path, chosen: list[int], form: str) -> list[bytes]:
    path = folder / f"t.{form}"
    said = frame(chosen).astype(str).assign(text=[f"film {place} é" * (place + 1) for place in chosen])
    if form == "csv":
        said.to_csv(path, index=False)
    elif form == "jsonl":
        said.to_json(path, orient="records", lines=True)
    else:
        said.to_parquet(path)
    declared = Texts(kind="texts", format=form, columns=("text",), label="y")  # type: ignore[arg-type]
    tables = rows.tables("train", path, declared, CLASSES)
    return [text.encode() for some in tables for text in texts.join_texts(some, declared)[0]]


def folder_of_images(folder: Path, chosen: list[int]) -> list[bytes]:
    paths = [folder / f"{place:02}.png" for place in chosen]
    for place, path in zip(chosen, paths, strict=True):
        pixels = np.random.default_rng(place).integers(0, 256, (5 + place, 9, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    found, _ = images.pixels(paths, Images(kind="images", mode="RGB"), (3, 6, 6))
    return [image.tobytes() for image in found]


def idx(folder: Path, chosen: list[int]) -> list[bytes]:
    pixels = np.stack([np.full((4, 4), place, np.uint8) for place in chosen])
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4) for size in pixels.shape)
    (folder / "images").write_bytes(gzip.compress(header + pixels.tobytes()))
    (folder / "labels").write_bytes(
        gzip.compress(b"\0\0\x08\x01" + len(chosen).to_bytes(4) + bytes(len(chosen)))
    )
    files = {f"{part}_{what}": folder / what for part in ("train", "test") for what in ("images", "labels")}
    return [row.tobytes() for row in next(images.read_idx(files, shape=(1, 4, 4))).records.features]


def cifar(folder: Path, chosen: list[int]) -> list[bytes]:
    for name in ("one", "two"):
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([1]) + bytes([place]) * 12 for place in chosen))
    declared = Cifar.model_validate_json(
        json.dumps({"kind": "cifar", "train": ["one"], "test": "two", "labels": "only"})
    )
    files = {"one": folder / "one.bin", "two": folder / "two.bin"}
    first = next(images.read_cifar(files, declared, shape=(3, 2, 2)))
    return [row.tobytes() for row in first.records.features]


def table_of_images(folder: Path, chosen: list[int]) -> list[bytes]:
    files = []
    for place in chosen:
        stream = io.BytesIO()
        pixels = np.random.default_rng(place).integers(0, 256, (5 + place, 9, 3), np.uint8)
        Image.fromarray(pixels).save(stream, "PNG")
        files.append(stream.getvalue() if place % 5 else b"no image")
    path = folder / "t.parquet"
    frame(chosen).assign(image=files).to_parquet(path)
    declared = ImageTable.model_validate(
        {"kind": "image_table", "format": "parquet", "image": "image", "label": "y", "mode": "RGB"}
    )
    found = [
        images.of_rows(some, declared, (3, 6, 6), None)[0]
        for some in rows.tables("train", path, declared, CLASSES)
    ]
    return [
        image.tobytes() + bytes([place]) for image, place in zip(np.concatenate(found), chosen, strict=True)
    ]


def saved_datasets(folder: Path, chosen: list[int]) -> list[bytes]:
    made = pa.Table.from_pandas(frame(chosen).astype(str), preserve_index=False)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, made.schema) as stream:
        stream.write_table(made)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    declared = Datasets.model_validate_json(json.dumps({"kind": "datasets", "columns": COLUMNS}))
    found = [
        encoding.features(some, declared, "t") for some in rows.tables("train", folder, declared, CLASSES)
    ]
    return [row.tobytes() for row in np.concatenate(found)]


def reviews(folder: Path, chosen: list[int]) -> list[bytes]:
    with tarfile.open(folder / "t.tar", "w") as archive:
        for place in chosen:
            content = f"film {place} é <br />end".encode()
            entry = tarfile.TarInfo(f"train/{('no', 'yes')[place % 2]}/{place}_1.txt")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    block = next(iter(texts.read_texts({"archive": folder / "t.tar"}, classes=("no", "yes"))))
    found = dict(
        zip((text.split()[1] for text in block.records.features), block.records.features, strict=True)
    )
    return [found[str(place)].encode() for place in chosen]


READERS: dict[str, Make] = {
    "table as csv": lambda folder, chosen: table(folder, chosen, "csv"),
    "table as parquet": lambda folder, chosen: table(folder, chosen, "parquet"),
    "texts as csv": lambda folder, chosen: rows_of_texts(folder, chosen, "csv"),
    "texts as jsonl": lambda folder, chosen: rows_of_texts(folder, chosen, "jsonl"),
    "texts as parquet": lambda folder, chosen: rows_of_texts(folder, chosen, "parquet"),
    "folder of images": folder_of_images,
    "idx": idx,
    "cifar": cifar,
    "table of images": table_of_images,
    "saved by Hugging Face": saved_datasets,
    "archive of reviews": reviews,
}


@pytest.mark.parametrize("name", READERS)
def test_a_record_is_read_alone_as_with_all_others(tmp_path: Path, name: str) -> None:
    read: Any = READERS[name]
    whole = read(tmp_path, list(range(30)))
    assert len(whole) == 30 and len({*whole}) > 10
    for place in (0, 13, 29):
        assert read(tmp_path, [place]) == [whole[place]]
    assert read(tmp_path, list(range(1, 30))) == whole[1:]
