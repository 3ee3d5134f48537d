"""A card becomes an entry of the registry of deployments that its own schema takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML
from typer.testing import CliRunner

from algorithms.privacy.card import PrivacyCard, build, load
from flows.cli.main import app
from tasks.registry import as_yaml, registry_entry
from tests.algorithms.privacy.conftest import KEY
from tests.support.cards import DEPLOYMENT, animals
from tests.support.refusals import refused_as
from tests.support.synthetic_run import record, write_run

jsonschema: Any = pytest.importorskip("jsonschema")
GOLDEN = Path(__file__).parents[1] / "golden"
SCHEMA = Path(__file__).parents[1] / "support/standards/dp-deployments-schema.yaml"


def _check(entry: Any, schema: Any) -> None:
    """Raises ValidationError for an entry that the schema does not take, forms of days included."""
    jsonschema.validate(entry, schema, format_checker=jsonschema.FormatChecker())


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> PrivacyCard:
    return build(record(write_run(tmp_path_factory.mktemp("private"))), KEY)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> PrivacyCard:
    return build(record(write_run(tmp_path_factory.mktemp("seeded"), kind="seeded")), KEY)


def tiers(schema: Any, entry: Any) -> list[int]:
    """The tier of each field that an entry fills in."""
    return [
        *([schema["tier"]] if isinstance(schema.get("tier"), int) else []),
        *(
            tier
            for name, part in schema.get("properties", {}).items()
            if isinstance(entry, dict) and name in entry
            for tier in tiers(part, entry[name])
        ),
    ]


def test_mechanisms_are_written_in_sentences(private: PrivacyCard) -> None:
    written = str(registry_entry(private, animals(deployment=DEPLOYMENT)))
    assert "gradient: gaussian noise, L2 bounds, poisson sampling" in written
    assert "key from the operating system. Software:" in written
    # A row of a table is held to its bounds and encoded, so that the records are not used as they are.
    assert (
        "Transform: Nothing but reading: each record by itself is held to what is declared of it" in written
    )
    assert "which is free. Learned features: Nothing was learned" in written
    assert "Trying out settings: Not part of this run's epsilon." in written


def test_an_entry_is_valid_and_says_what_the_card_knows(private: PrivacyCard) -> None:
    schema = YAML(typ="safe", pure=True).load(SCHEMA)
    entry = YAML(typ="safe", pure=True).load(as_yaml(registry_entry(private, animals(deployment=DEPLOYMENT))))
    _check(entry, schema)
    assert sum(tier > 1 for tier in tiers(schema, entry)) >= 14
    deployment = entry["deployment"]
    assert deployment["privacy_loss"]["privacy_parameters"] == {"epsilon": private.cost, "delta": 1e-5}
    assert deployment["basic"]["data_curators"] == ["The clinic"]
    assert deployment["dp_variant"]["variant_name"] == "Approximate DP"
    del entry["deployment"]["basic"]["data_curators"]
    with pytest.raises(jsonschema.ValidationError):
        _check(entry, schema)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("card-*.json")), ids=lambda path: path.stem)
def test_an_entry_of_every_method_is_valid(path: Path) -> None:
    entry = as_yaml(registry_entry(load(path), animals(deployment=DEPLOYMENT)))
    _check(YAML(typ="safe", pure=True).load(entry), YAML(typ="safe", pure=True).load(SCHEMA))


@pytest.mark.parametrize("day", ["20260131", "2026-W05-6", "31.01.2026"])
def test_a_day_in_another_form_is_refused(day: str) -> None:
    with pytest.raises(ValidationError, match="published"):
        animals(deployment=DEPLOYMENT | {"published": day})


def test_what_the_form_cannot_say_is_refused(private: PrivacyCard, seeded: PrivacyCard) -> None:
    with refused_as("card_not_private", guarantee="seeded"):
        registry_entry(seeded, animals(deployment=DEPLOYMENT))
    with refused_as("bad_card", keys=("deployment",)):
        registry_entry(private, animals())


def test_the_section_changes_no_digest_of_a_animals() -> None:
    assert animals(deployment=DEPLOYMENT).model_dump_json() == animals().model_dump_json()


def test_the_command_writes_the_entry(
    private: PrivacyCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "params.yaml").touch()
    (tmp_path / "dvc.yaml").touch()
    document = json.loads(animals().model_dump_json()) | {"deployment": DEPLOYMENT}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "data/cards/animals.yaml")
    (tmp_path / "privacy_card.json").write_bytes(private.to_bytes())
    monkeypatch.chdir(tmp_path)
    arguments = ["card", "export", "privacy_card.json", "--to", "registry", "--output", "entry.yaml"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "entry.yaml").read_text() == as_yaml(
        registry_entry(private, animals(deployment=DEPLOYMENT))
    )
    assert CliRunner().invoke(app, arguments).exit_code != 0  # it is there already
