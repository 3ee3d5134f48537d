"""A small share of `python -m tests.soak.fuzz`: changed files are taken or refused, and mean nothing else."""

from pathlib import Path

import pytest

from tests.soak.fuzz import Target, targets, tried

NAMES = (
    "privacy_card.json",
    "params.yaml",
    "digits.yaml",
    "retrain.yaml",
    "table.csv",
    "table.parquet",
    "model.safetensors",
    "copy.jsonl",
    "ledger.sqlite",
    "checkpoint.json",
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_file_is_taken_or_refused_in_a_sentence(
    name: str, examples: dict[str, Target], tmp_path: Path
) -> None:
    found = tried(examples[name], tmp_path, 25, seed=1)
    assert found.problems == []
    assert found.changed > 20
