"""A user's own table, from the example card to prepared arrays, by the task that DVC runs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from data import DataRefusedError, prepared
from data.card import CARDS
from data.files import keyed_digest, owner_key
from tasks.config.params import DataParams, Params
from tasks.prepare import prepare
from tests.support.refusals import refused_as

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "examples" / "own_data"
IPUMS_ROWS = (
    "YEAR,AGE,SEX,MARST,RACE,CITIZEN,NCHILD,FAMSIZE,OWNERSHP,VETSTAT,EDUC,EMPSTAT,CLASSWKR,UHRSWORK,HIGH_INCOME\n"
) + "".join(f"2000,{20 + i},{i % 2 + 1},6,1,0,2,4,1,1,{i % 12},1,2,40,{i % 2}\n" for i in range(60))
VISITS = Params({"data": DataParams(dataset="visits")})


def run(destination: Path, *, home: Path, root: Path = PROJECT, cards: Path = EXAMPLE) -> None:
    """Prepare the example."""
    prepare(VISITS, mirror=None, home=home, destination=destination, root=root, cards=cards)


def test_the_example_is_prepared(tmp_path: Path) -> None:
    run(tmp_path / "prepared", home=tmp_path / "home")
    loaded = prepared.load(tmp_path / "prepared")
    assert (loaded.info.dataset, loaded.info.is_public, loaded.info.records) == ("visits", False, None)
    assert loaded.train_features.shape[1:] == (11,) == loaded.info.input_shape
    assert len(loaded.train_labels) + len(loaded.test_labels) == 1200
    assert 250 < len(loaded.test_labels) < 350
    assert loaded.train_features.min() >= 0 and loaded.train_features.max() <= 1
    unknown = loaded.train_features[:, 5].mean()  # the card does not list "employer", a quarter of the rows
    assert 0.2 < unknown < 0.3
    assert set(loaded.train_labels) == {0, 1}


def test_preparing_again_gives_the_same_bytes_and_another_owner_another_salt(tmp_path: Path) -> None:
    for name, home in (("one", "home"), ("two", "home"), ("three", "other")):
        run(tmp_path / name, home=tmp_path / home)
    for file in os.listdir(tmp_path / "one"):
        one, two, three = ((tmp_path / name / file).read_bytes() for name in ("one", "two", "three"))
        assert one == two
        assert (one == three) == (file != "salt")


def test_one_record_less_changes_one_row_and_not_the_folder_s_size(tmp_path: Path) -> None:
    project = _project_without_the_last_record(tmp_path)
    run(tmp_path / "all", home=tmp_path)
    run(tmp_path / "less", home=tmp_path, root=project, cards=project / "cards")
    whole, less = prepared.load(tmp_path / "all"), prepared.load(tmp_path / "less")
    gone = len(whole.train_labels) - len(less.train_labels)
    assert gone + len(whole.test_labels) - len(less.test_labels) == 1
    np.testing.assert_array_equal(less.train_features, whole.train_features[: len(less.train_labels)])
    np.testing.assert_array_equal(less.test_features, whole.test_features[: len(less.test_labels)])
    assert _size(tmp_path / "all") == _size(tmp_path / "less")


def _project_without_the_last_record(tmp_path: Path) -> Path:
    own = tmp_path / "project" / "examples" / "own_data" / "visits.csv"
    own.parent.mkdir(parents=True)
    content = (EXAMPLE / "visits.csv").read_bytes()
    own.write_bytes(b"\n".join(content.splitlines()[:-1]) + b"\n")
    cards = tmp_path / "project" / "cards"
    cards.mkdir()
    old, new = (hashlib.sha256(text).hexdigest() for text in (content, own.read_bytes()))
    (cards / "visits.yaml").write_text((EXAMPLE / "visits.yaml").read_text().replace(old, new))
    return tmp_path / "project"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_refusal_leaves_the_prepared_folder_as_it_was(tmp_path: Path) -> None:
    run(tmp_path / "prepared", home=tmp_path)
    with refused_as("missing_file", DataRefusedError):
        run(tmp_path / "prepared", home=tmp_path, root=tmp_path)
    assert prepared.load(tmp_path / "prepared").info.dataset == "visits"


def test_too_many_records_for_the_declared_bound_are_refused(tmp_path: Path) -> None:
    cards = tmp_path / "cards"
    cards.mkdir()
    text = (EXAMPLE / "visits.yaml").read_text()
    (cards / "visits.yaml").write_text(text.replace("at_most: 2000", "at_most: 1199"))
    with refused_as("too_many_records", DataRefusedError, at_most=1199):
        run(tmp_path / "prepared", home=tmp_path, cards=cards)
    assert not (tmp_path / "prepared").exists()


def test_a_table_with_a_test_file_is_not_split(tmp_path: Path) -> None:
    project = _project_without_the_last_record(tmp_path)
    own, cards = project / "examples/own_data", project / "cards"
    lines = (EXAMPLE / "visits.csv").read_bytes().splitlines(keepends=True)
    (own / "test.csv").write_bytes(lines[0] + lines[-1])
    text = (cards / "visits.yaml").read_text()
    split = next(line for line in text.splitlines() if line.startswith("split:"))
    sha256 = hashlib.sha256((own / "test.csv").read_bytes()).hexdigest()
    test = f"  test: {{path: examples/own_data/test.csv, sha256: {sha256}}}"
    (cards / "visits.yaml").write_text(text.replace(split, test))
    run(tmp_path / "prepared", home=tmp_path, root=project, cards=cards)
    loaded = prepared.load(tmp_path / "prepared")
    assert (len(loaded.train_labels), len(loaded.test_labels)) == (1199, 1)


def test_one_file_by_two_checksums_is_still_one_file(tmp_path: Path) -> None:
    """A copy of the training file, of which the card gives the keyed checksum."""
    project = _project_without_the_last_record(tmp_path)
    own, cards = project / "examples/own_data", project / "cards"
    copy = (own / "visits.csv").read_bytes()
    (own / "copy.csv").write_bytes(copy)
    mark = keyed_digest(owner_key(tmp_path), [hashlib.sha256(copy).hexdigest()]).hex()
    text = (cards / "visits.yaml").read_text()
    split = next(line for line in text.splitlines() if line.startswith("split:"))
    test = f"  test: {{path: examples/own_data/copy.csv, keyed_sha256: {mark}}}"
    (cards / "visits.yaml").write_text(text.replace("2000", "2400").replace(split, test))
    with refused_as("bad_card", DataRefusedError, keys=("files",)):
        run(tmp_path / "prepared", home=tmp_path, root=project, cards=cards)


def test_the_template_of_ipums_is_refused_until_its_file_is_there_and_declared(tmp_path: Path) -> None:
    ipums = Params({"data": DataParams(dataset="ipums")})
    own = tmp_path / "datasets" / "raw" / "ipums" / "ipums.csv"
    cards = tmp_path / "cards"
    cards.mkdir()
    template = (CARDS / "ipums.yaml").read_text()
    (cards / "ipums.yaml").write_text(template)

    def attempt() -> None:
        prepare(ipums, mirror=None, home=tmp_path, destination=tmp_path / "p", root=tmp_path, cards=cards)

    with refused_as("missing_file", DataRefusedError, path=own):
        attempt()
    own.parent.mkdir(parents=True)
    own.write_text(IPUMS_ROWS)
    with refused_as("altered_file", DataRefusedError, path=own) as refusal:
        attempt()
    proper = str(refusal.value.fields["checksum"])
    (cards / "ipums.yaml").write_text(template.replace("0" * 64, proper))
    attempt()
    loaded = prepared.load(tmp_path / "p")
    assert len(loaded.train_labels) + len(loaded.test_labels) == 60
    assert set(loaded.train_labels) == {0, 1} and loaded.train_features.max() <= 1


def test_the_stage_runs_as_dvc_runs_it(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data: {dataset: digits}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cards").symlink_to(PROJECT / "data/cards")
    environment = os.environ | {"EPSILONFLOW_HOME": str(tmp_path / "home"), "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "tasks.prepare"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert prepared.load(tmp_path / "datasets" / "prepared").info.records == 1436
    (tmp_path / "params.yaml").write_text("data: {dataset: digit}\n")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no data set 'digit'" in done.stderr
    assert "Traceback" not in done.stderr
