"""Changes to params.yaml: recipes, single values, comments kept, and nothing written that is not valid."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from algorithms.errors import RefusedError
from algorithms.methods import CATALOGUE
from algorithms.methods.dp_agd import DPAGD
from algorithms.privacy.accounting.gaussian import noise_for_share
from comparisons.defaults import BEFORE, accuracy, table
from data import DataRefusedError
from data.card import DataCard, RecordCounts, card_names, data_card
from tasks.config import params
from tasks.config.overrides import (
    ParamOverrides,
    ParamsEdit,
    explain_recipe,
    params_edit,
    recipe,
    settings_of,
)
from tasks.config.params import ParamsRefusedError
from tests.support.cards import card, category, csv_of, label, number
from tests.support.checkout import PROJECT
from tests.support.refusals import refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cards").symlink_to(PROJECT / "data" / "cards")
    return tmp_path


def lines(text: str) -> set[str]:
    return set(text.splitlines())


def test_nothing_asked_for_changes_nothing(root: Path) -> None:
    assert not params_edit(root, ParamOverrides()).changes


def test_a_file_gets_the_groups_that_dvc_wants_of_it(root: Path) -> None:
    """Whoever writes a file by hand leaves out what is none."""
    stages = YAML(typ="safe", pure=True).load(PROJECT / "dvc.yaml")["stages"]
    tracked = {group for stage in stages.values() for group in stage.get("params", ())}
    path = root / "params.yaml"
    written = YAML(typ="safe", pure=True).load(path)
    needed = ("data", "privacy", "algorithm", "model")
    YAML(typ="safe", pure=True).dump({group: written[group] for group in needed}, path)
    assert tracked <= YAML(typ="safe", pure=True).load(params_edit(root, ParamOverrides()).after).keys()


def test_the_file_as_it_comes_is_the_recipe_of_its_data_set(root: Path) -> None:
    overrides = ParamOverrides(dataset="digits", algorithm="dp_sgd", epsilon=3, delta=0.00001, seed=0)
    assert params_edit(root, overrides).after == (root / "params.yaml").read_text()


def test_another_data_set_keeps_the_precision_and_the_start(root: Path) -> None:
    params_edit(root, ParamOverrides(settings={"model.precision": "bfloat16"}, seed=7)).write()
    after = params_edit(root, ParamOverrides(dataset="adult")).after
    assert "  name: logistic\n  seed: 7\n  precision: bfloat16" in after


def test_a_value_changes_its_line_and_no_other(root: Path) -> None:
    edit = params_edit(root, ParamOverrides(epsilon=0.5))
    assert lines(edit.before) ^ lines(edit.after) == {"  epsilon: 3.0", "  epsilon: 0.5"}
    assert (root / "params.yaml").read_text() == edit.before
    edit.write()
    assert (root / "params.yaml").read_text() == edit.after
    edit.undo()
    assert (root / "params.yaml").read_text() == edit.before


def test_comments_and_empty_values_stay(root: Path) -> None:
    after = params_edit(root, ParamOverrides(dataset="adult")).after
    assert "# a data card in data/cards" in after
    assert "url: null # or the URL of a database" in after


def test_blank_lines_stay_between_groups_where_keys_are_added(root: Path) -> None:
    params_edit(root, ParamOverrides(dataset="imdb", encoder="wordllama")).write()
    again = params_edit(root, ParamOverrides(dataset="imdb", encoder="wordllama", seed=7)).after
    groups = again.split("\n\n")[1:]
    assert [group.partition(":")[0] for group in groups] == list(YAML(typ="safe", pure=True).load(again))


def test_blank_lines_within_a_value_stay_where_they_are(root: Path) -> None:
    path = root / "params.yaml"
    plain = re.sub(r"\n  settings: .*", "", path.read_text())
    text = plain.replace(
        "\n\nperformance:", "\n  settings:\n    words: |\n      two\n\n      lines\nperformance:"
    )
    path.write_text(text)
    before = YAML(typ="safe", pure=True).load(text)["model"]["settings"]
    after = params_edit(root, ParamOverrides(epsilon=2.0)).after
    assert YAML(typ="safe", pure=True).load(after)["model"]["settings"] == before


def test_a_data_set_brings_its_recipe_and_keeps_the_seed(root: Path) -> None:
    params_edit(root, ParamOverrides(seed=7)).write()
    chosen = params_edit(root, ParamOverrides(dataset="adult")).params
    wanted = recipe(data_card("adult"), "dp_sgd", 3.0)
    assert (chosen.data.dataset, chosen.model.name, chosen.model.seed) == ("adult", "logistic", 7)
    assert chosen.algorithm_settings == {"name": "dp_sgd", **wanted.settings}


def test_an_algorithm_alone_brings_the_recipe_of_the_data_set_that_stands(root: Path) -> None:
    params_edit(root, ParamOverrides(dataset="mnist")).write()
    chosen = params_edit(root, ParamOverrides(algorithm="non_private")).params
    assert chosen.data.dataset == "mnist"
    assert chosen.algorithm_settings == {
        "name": "non_private",
        **recipe(data_card("mnist"), "non_private", 3.0).settings,
    }


def test_single_values_come_after_the_recipe(root: Path) -> None:
    settings = settings_of(["algorithm.steps=17", "privacy.delta=1e-6", "algorithm.update.optimizer=adam"])
    chosen = params_edit(root, ParamOverrides(dataset="mnist", delta=1e-7, settings=settings)).params
    assert (chosen.algorithm_settings["steps"], chosen.privacy.delta) == (17, 1e-6)
    assert chosen.algorithm_settings["update"]["optimizer"] == "adam"


@pytest.mark.parametrize(
    ("asked", "gone"),
    [
        ("sampling_rate", "expected_batch_size"),
        ("norm_noise", "norm_noise_multiplier"),
    ],
)
def test_a_setting_that_is_asked_for_replaces_the_other_one_for_the_same_thing(
    root: Path, asked: str, gone: str
) -> None:
    recipe = ParamOverrides(dataset="digits", algorithm="dpis")
    assert gone in params_edit(root, recipe).params.algorithm_settings
    one = replace(recipe, settings={f"algorithm.{asked}": 0.25})
    settings = params_edit(root, one).params.algorithm_settings
    assert (settings[asked], gone in settings) == (0.25, False)
    both = replace(recipe, settings={f"algorithm.{asked}": 0.25, f"algorithm.{gone}": 7})
    settings = params_edit(root, both).params.algorithm_settings
    assert (settings[asked], settings[gone]) == (0.25, 7)
    none = replace(recipe, settings={f"algorithm.{asked}": None})
    assert gone in params_edit(root, none).params.algorithm_settings


@pytest.mark.parametrize(
    ("dataset", "name"),
    [*((dataset, "dp_sgd") for dataset in card_names()), *(("adult", name) for name in CATALOGUE)],
)
def test_every_recipe_is_valid_and_its_batches_fit(root: Path, dataset: str, name: str) -> None:
    records = data_card(dataset).records.train
    chosen = params_edit(root, ParamOverrides(dataset=dataset, algorithm=name)).params
    batch = chosen.algorithm_settings.get("expected_batch_size") or 1
    assert records is None or batch <= records
    assert chosen.algorithm is not None


@pytest.mark.parametrize(
    ("shape", "classes", "model"),
    [
        ((12,), ("no", "yes"), "logistic"),
        ((12,), ("a", "b", "c"), "softmax"),
        ((1, 8, 8), ("a", "b"), "softmax"),
        ((3, 32, 32), ("a", "b"), "tanh_cnn"),
    ],
)
def test_a_data_set_without_a_recipe_gets_a_model_by_its_shape(
    shape: tuple[int, ...], classes: tuple[str, ...], model: str
) -> None:
    assert recipe(own_card(shape, classes, RecordCounts(train=1000, test=100)), "dp_sgd", 1.0).model == model


def test_batches_follow_from_a_public_number_of_records_and_never_from_a_private_one() -> None:
    public = recipe(own_card((3,), ("a", "b"), RecordCounts(train=1000, test=100)), "dp_sgd", 1.0).settings
    private = recipe(own_card((3,), ("a", "b"), RecordCounts(at_most=5000)), "dp_sgd", 1.0).settings
    assert public["expected_batch_size"] == 100
    assert "sampling_rate" not in public
    assert private["sampling_rate"] == 0.1
    assert "expected_batch_size" not in private


@pytest.mark.parametrize(
    ("shape", "records", "schedule"),
    [((1, 28, 28), 60_000, "constant"), ((1, 28, 28), 1000, "linear"), ((1, 8, 8), 60_000, "linear")],
)
def test_only_the_largest_rate_of_a_network_for_images_stays_as_it_is(
    shape: tuple[int, ...], records: int, schedule: str
) -> None:
    chosen = recipe(own_card(shape, ("a", "b"), RecordCounts(train=records, test=100)), "dp_sgd", 3.0)
    assert chosen.settings["update"]["schedule"] == schedule


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("records", [RecordCounts(train=1000, test=100), RecordCounts(at_most=2000)])
def test_the_usual_recipe_is_one_that_its_algorithm_takes(name: str, records: RecordCounts) -> None:
    """Whether it can run on a private number of records is said in a sentence of its own, by its plan."""
    chosen = recipe(own_card((3,), ("a", "b"), records), name, 1.0)
    settings = {"algorithm": {"name": name, **chosen.settings}}
    assert params.parse(settings, reads=("algorithm",)).algorithm is not None


def test_the_usual_learning_rate_follows_from_the_noise_that_public_numbers_make() -> None:
    """Twice the records or epsilon is half the noise; more parameters are more noise; a smaller bound is less."""

    def rate(
        n: int, epsilon: float, shape: tuple[int, ...] = (24,), classes: tuple[str, ...] = ("a", "b")
    ) -> float:
        settings = recipe(
            own_card(shape, classes, RecordCounts(train=n, test=100)), "dp_sgd", epsilon
        ).settings
        found: float = settings["update"]["learning_rate"] * settings["clip_norm"]
        return found

    assert rate(5000, 1.0) == pytest.approx(0.1 * 5000 / (65 * 5), rel=0.05)
    assert rate(1000, 2.0) == rate(2000, 1.0) == pytest.approx(2 * rate(1000, 1.0), rel=0.05)
    assert rate(1000, 1.0, (24,), ("a", "b", "c", "d")) == pytest.approx(rate(1000, 1.0) / 2, rel=0.05)
    assert rate(10**7, 8.0) == 8.0
    assert rate(10**7, 8.0, (1, 28, 28)) == pytest.approx(0.8)


def test_the_recipe_is_for_the_epsilon_that_is_asked_for(root: Path) -> None:
    (root / "data" / "cards").unlink()
    (root / "data" / "cards").mkdir()
    for file in (PROJECT / "data/cards/digits.yaml", PROJECT / "examples/own_data/visits.yaml"):
        (root / "data" / "cards" / file.name).write_text(file.read_text())
    by_option = params_edit(root, ParamOverrides(dataset="visits", epsilon=0.5)).params.algorithm_settings
    by_key = params_edit(
        root, ParamOverrides(dataset="visits", settings={"privacy.epsilon": 0.5})
    ).params.algorithm_settings
    usual = params_edit(root, ParamOverrides(dataset="visits")).params.algorithm_settings
    assert by_option == by_key
    assert usual["update"]["learning_rate"] > 5 * by_key["update"]["learning_rate"]


def test_the_usual_settings_learn_where_the_majority_is_the_easy_answer() -> None:
    """A table of 5,000 rows at epsilon 1, 73 % of them in one class, of which the settings of before said it of all."""
    made = table(5000)
    chosen = recipe(made.card(), "dp_sgd", 1.0)
    majority = np.bincount(made.labels[-made.test :]).max() / made.test
    found = accuracy(made, chosen.model, chosen.settings, name="dp_sgd", epsilon=1.0, seeds=1)
    before = accuracy(
        made, chosen.model, BEFORE | {"expected_batch_size": 250}, name="dp_sgd", epsilon=1.0, seeds=1
    )
    assert before == pytest.approx(majority, abs=0.002)
    assert found > majority + 0.03


def own_card(shape: tuple[int, ...], classes: tuple[str, ...], records: RecordCounts) -> DataCard:
    """A card of which only the parts that a recipe looks at hold together."""
    known = data_card("mnist")
    return known.model_copy(update={"name": "own", "shape": shape, "classes": classes, "records": records})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (ParamOverrides(dataset="nist"), "no data set 'nist'"),
        (ParamOverrides(algorithm="sgd"), "no algorithm 'sgd'"),
        (ParamOverrides(epsilon=0.0), "params.yaml with what was asked: privacy.epsilon is 0.0"),
        (ParamOverrides(settings={"privacy.epsilon.x": 1}), "privacy.epsilon.x"),
        (ParamOverrides(settings={"privcy.epsilon": 1}), "privcy"),
        (ParamOverrides(settings={"privacy": 3}), "privacy"),
        (ParamOverrides(settings={"algorithm": {}}), "algorithm"),
        (ParamOverrides(settings={"data.dataset": "nist"}), "no data set 'nist'"),
        (
            ParamOverrides(settings={"algorithm.name": "dp_gd"}),
            "and dp_gd has no clipping, expected_batch_size; choose it by --algorithm dp_gd, which replaces them",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    root: Path, overrides: ParamOverrides, words: str
) -> None:
    before = (root / "params.yaml").read_bytes()
    with refused(words, (DataRefusedError, RefusedError)):
        params_edit(root, overrides)
    assert (root / "params.yaml").read_bytes() == before


def test_settings_are_read_as_yaml() -> None:
    read = settings_of(["a.b=1e-5", "c=null", "d=[1, 2]", "e=a=b", "f=", "g='1'"])
    assert read == {"a.b": 1e-5, "c": None, "d": [1, 2], "e": "a=b", "f": None, "g": "1"}


@pytest.mark.parametrize("text", ["epsilon", "=3", ".=3", "a=[", "a={b: 1"])
def test_settings_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ParamsRefusedError):
        settings_of([text])


def test_another_data_set_leaves_what_was_for_the_old_one(root: Path) -> None:
    old = {"data.transform": "scattering", "features.name": "whitened", "features.groups": 9}
    old |= {"model.name": "unit_linear", "model.settings": {"bias": 0.5}}
    params_edit(root, ParamOverrides(dataset="mnist", settings=old)).write()
    after = params_edit(root, ParamOverrides(dataset="imdb", algorithm="dp_sgd")).params
    assert (after.data.transform, after.features) == ("none", None)
    assert (after.model.name, after.model.settings) == ("bilstm", {})


def test_another_data_set_leaves_the_names_of_the_old_ones_blocks(root: Path) -> None:
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("blocks: []", "blocks: [2026-W01]"))
    assert params_edit(root, ParamOverrides("digits", epsilon=2.0)).params.data.blocks == ["2026-W01"]
    assert params_edit(root, ParamOverrides("adult")).params.data.blocks == []
    kept = ParamOverrides("adult", settings={"data.blocks": ["2026-W02"]})
    assert params_edit(root, kept).params.data.blocks == ["2026-W02"]


def test_a_list_stands_on_the_line_of_its_key_and_may_become_empty_again(root: Path) -> None:
    path = root / "params.yaml"
    line = next(line for line in path.read_text().splitlines() if "blocks:" in line)
    for blocks in (["2026-W01", "2026-W02"], [], ["2026-W03"]):
        params_edit(root, ParamOverrides(settings={"data.blocks": blocks})).write()
        assert params.load(path, reads=("data",)).data.blocks == blocks
        written = next(line for line in path.read_text().splitlines() if "blocks:" in line)
        assert written.partition("#")[2] == line.partition("#")[2] != ""


PAPERS = settings_of(["algorithm.paper_budget=true"])


def clip_norm_of(edit: ParamsEdit) -> float:
    """The clip norm that DP-AGD takes after an edit."""
    method = edit.params.algorithm
    assert isinstance(method, DPAGD)
    return method.choices.clip_norm


def test_a_papers_protocol_is_not_overridden_by_the_recipe(root: Path) -> None:
    asked = ParamOverrides(dataset="adult", algorithm="dp_agd", settings=PAPERS)
    assert recipe(data_card("adult"), "dp_agd", 3.0).settings["clip_norm"] == 2.0
    edit = params_edit(root, asked)
    assert edit.params.algorithm_settings == {"name": "dp_agd", "clip_norm": 3.0, "paper_budget": True}
    assert clip_norm_of(edit) == 3.0
    one = replace(asked, settings=PAPERS | {"algorithm.clip_norm": 1.5})
    assert params_edit(root, one).params.algorithm_settings["clip_norm"] == 1.5


def test_a_papers_protocol_replaces_what_a_recipe_left_in_the_file(root: Path) -> None:
    params_edit(root, ParamOverrides(dataset="adult", algorithm="dp_agd")).write()
    params_edit(root, ParamOverrides(settings=PAPERS)).write()
    settings = params_edit(root, ParamOverrides(epsilon=0.5)).params.algorithm_settings
    assert settings == {"name": "dp_agd", "clip_norm": 3.0, "paper_budget": True}


def test_a_papers_protocol_stays_on_another_data_set(root: Path) -> None:
    params_edit(root, ParamOverrides(dataset="adult", algorithm="dp_agd", settings=PAPERS)).write()
    other = ParamOverrides(dataset="bank-marketing")
    assert clip_norm_of(params_edit(root, other)) == 3.0
    off = replace(other, settings=settings_of(["algorithm.paper_budget=false"]))
    assert clip_norm_of(params_edit(root, off)) == 2.0
    assert "paper_budget" not in params_edit(root, replace(other, algorithm="dp_agd")).after


def test_an_analysis_that_knows_no_clipping_does_not_get_the_recipes(root: Path) -> None:
    settings = settings_of(["algorithm.analysis=kst"])
    asked = ParamOverrides(dataset="adult", algorithm="objective_perturbation", settings=settings)
    assert params_edit(root, asked).params.algorithm_settings["clip_norm"] is None


@pytest.mark.parametrize("name", [name for name, kind in CATALOGUE.items() if hasattr(kind, "paper_switch")])
def test_a_paper_switch_decides_settings_that_exist(name: str) -> None:
    kind: Any = CATALOGUE[name]
    switch = kind.paper_switch
    assert {switch.name, *switch.settings} <= {field.name for field in fields(CATALOGUE[name])}


def card_of_prices(
    records: dict[str, int],
    target: dict[str, bool] | None,
    person: Mapping[str, object] | None = None,
    **cells: object,
) -> DataCard:
    """Three columns as cells; target: of what kind the number to predict is, None for classes."""
    columns = (number("x", 0.0, 1.0), number("z", 0.0, 1.0), category("kind", "old", "new"))
    if person is not None:
        columns = (*columns, {"name": "id", "kind": "ignored"})
    document = card(
        "prices",
        records=records,
        reader=csv_of(*columns, label("price")) | {"cells": {"trees": 4} | cells},
        files={part: {"path": f"{part}.csv", "keyed_sha256": "0" * 64} for part in ("train", "test")},
        **({"classes": ["low", "high"]} if target is None else {"target": {"bounds": [0.0, 9.0]} | target}),
        **({} if person is None else {"person": person}),
    )
    return DataCard.model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    ("records", "target", "features", "noise"),
    [
        ({"train": 2000, "test": 100}, {}, "histograms", 16.7),
        ({"train": 1000, "test": 100}, {}, "target_scale", 11.8),  # 40 times the noise of a count is 1,340
        ({"at_most": 10_000}, {}, "target_scale", 16.7),  # there may be a tenth of them
        ({"at_most": 20_000}, {}, "histograms", 16.7),
        ({"train": 2000, "test": 100}, {"counts": True}, "target_scale", 16.5),
        ({"train": 2000, "test": 100}, None, "none", 0.0),
    ],
)
def test_histograms_are_for_a_number_of_as_many_records_as_their_noise_needs(
    records: dict[str, int], target: dict[str, bool] | None, features: str, noise: float
) -> None:
    """At epsilon 1, 5 % of the squared mu is noise of 16.7 for each unit of sensitivity, here 2: four histograms.

    A number without them takes up to 10 %, if its records are few.
    """
    known = card_of_prices(records, target)
    advised = recipe(known, "dp_sgd", 1.0)
    assert advised.features["name"] == features
    if features != "none":
        assert advised.features["noise"] == pytest.approx(noise, abs=0.05)
        assert "5%" in explain_recipe(known, advised)["features"]


@pytest.mark.parametrize(
    ("records", "epsilon", "trees"),
    [
        ({"train": 19_900, "test": 100}, 3.0, {}),
        ({"train": 20_000, "test": 100}, 2.5, {"splits": "by_content", "trees": 128, "depth": 5}),  # 12,314
        ({"train": 20_000, "test": 100}, 3.2, {"splits": "by_content", "trees": 256, "depth": 5}),  # 15,260
        ({"train": 22_300, "test": 100}, 1.0, {}),  # 5,979 standard deviations of a count
        ({"train": 22_500, "test": 100}, 1.0, {"splits": "by_content", "trees": 128}),
        ({"train": 37_200, "test": 100}, 1.0, {"splits": "by_content", "trees": 128}),  # 9,973
        ({"train": 37_400, "test": 100}, 1.0, {"splits": "by_content", "trees": 128, "depth": 5}),
        ({"train": 55_900, "test": 100}, 1.0, {"splits": "by_content", "trees": 128, "depth": 5}),  # 14,987
        ({"train": 56_000, "test": 100}, 1.0, {"splits": "by_content", "trees": 256, "depth": 5}),  # 15,013
        ({"at_most": 66_000}, 1.0, {}),  # there may be a third of them
        ({"at_most": 112_200}, 1.0, {"splits": "by_content", "trees": 128, "depth": 5}),
    ],
)
def test_trees_split_by_content_and_there_are_more_where_there_is_more_to_learn_from(
    records: dict[str, int], epsilon: float, trees: dict[str, Any]
) -> None:
    features = dict(recipe(card_of_prices(records, {}), "dp_sgd", epsilon).features)
    for name in ("noise", "mean_noise"):
        features.pop(name)
    assert features == {"name": "histograms", **trees}


@pytest.mark.parametrize(("finest", "is_learned"), [(64, True), (255, True), (256, False), (512, False)])
def test_the_finest_grid_of_many_cells_is_for_the_histograms_alone(finest: int, is_learned: bool) -> None:
    for records in (20_000, 40_000):
        known = card_of_prices({"train": records, "test": 100}, {}, grids=[4, 16, finest])
        assert recipe(known, "dp_sgd", 1.0).features.get("learns_finest", True) is is_learned


@pytest.mark.parametrize(
    ("records", "finest", "counted"),
    [
        (55_900, 256, {"learns_finest": False, "trees": 128, "depth": 5}),
        (55_900, 512, {"learns_finest": False, "merged_cells": 2, "trees": 128, "depth": 5}),
        (55_900, 1000, {"learns_finest": False, "trees": 128, "depth": 5}),  # not in 256 equal parts
        (55_900, 1024, {"learns_finest": False, "merged_cells": 4, "trees": 128, "depth": 5}),
        (56_000, 256, {"learns_finest": False, "trees": 256, "depth": 5}),
        (56_000, 1024, {"learns_finest": False, "trees": 256, "depth": 6}),
        (5_000_000, 1024, {"learns_finest": False, "trees": 256, "depth": 6}),
    ],
)
def test_very_many_cells_are_counted_one_by_one_where_there_is_most_to_learn_from(
    records: int, finest: int, counted: dict[str, Any]
) -> None:
    known = card_of_prices({"train": records, "test": 100}, {}, grids=[4, 16, finest])
    features = dict(recipe(known, "dp_sgd", 1.0).features)
    for name in ("name", "noise", "mean_noise", "splits"):
        features.pop(name)
    assert features == counted


@pytest.mark.parametrize(
    ("records", "epsilon", "target", "limit"),
    [
        ({"train": 480, "test": 100}, 1.0, {}, 0.27),  # it is shrunk
        ({"train": 1500, "test": 100}, 1.0, {}, 0.3),  # 1500 / 3.73 standard deviations of a count
        ({"at_most": 4500}, 1.0, {}, 0.3),  # there may be a third of them
        ({"train": 480, "test": 100}, 1.0, {"quantile": 0.9}, 0.17),
        ({"train": 480, "test": 100}, 0.5, {"quantile": 0.9}, 0.12),
        ({"train": 100_000, "test": 100}, 1.0, {}, 0.35),
        ({"train": 480, "test": 100}, 1.0, None, 0.34),
        ({"train": 1500, "test": 100}, 1.0, None, 0.6),
        ({"at_most": 4500}, 1.0, None, 0.6),
        ({"train": 100_000, "test": 100}, 1.0, None, 0.7),
    ],
)
def test_less_noise_is_let_in_where_there_is_less_to_learn_from(
    records: dict[str, int], epsilon: float, target: dict[str, Any] | None, limit: float
) -> None:
    known = card_of_prices(records, target)
    advised = recipe(known, "dp_sgd", epsilon)
    assert advised.settings["update"]["noise_limit"] == limit
    assert explain_recipe(known, advised)["learning rate"].endswith(f"more than {limit:g}")


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("target", [None, {}, {"quantile": 0.9}], ids=["classes", "number", "quantile"])
@pytest.mark.parametrize("records", [{"train": 1000, "test": 100}, {"at_most": 2000}])
def test_the_recipe_of_cells_is_one_that_its_algorithm_takes(
    name: str, target: dict[str, Any] | None, records: dict[str, int]
) -> None:
    chosen = recipe(card_of_prices(records, target), name, 1.0)
    settings = {"algorithm": {"name": name, **chosen.settings}}
    assert params.parse(settings, reads=("algorithm",)).algorithm is not None


@pytest.mark.parametrize(
    ("records", "limit"),
    [
        ({"train": 480, "test": 100}, 0.34),  # as of dp_sgd that is not shrunk
        ({"at_most": 4500}, 0.6),
        ({"train": 100_000, "test": 100}, 0.7),
    ],
)
def test_methods_that_bound_norms_clip_nothing_of_cells_and_let_in_less_noise_where_there_is_less_to_learn(
    records: dict[str, int], limit: float
) -> None:
    known = card_of_prices(records, None)
    objective, output, steps = (
        recipe(known, f"{name}", 1.0).settings
        for name in ("objective_perturbation", "output_perturbation", "norm_bound_sgd")
    )
    assert objective["clip_norm"] is None and objective["noise_limit"] == limit
    assert output["clip_norm"] is None and output["noise_limit"] == 0.25
    assert steps["update"]["noise_limit"] == limit and steps["update"]["momentum"] >= 0.9
    assert steps.keys() == {*steps.keys() & {"expected_batch_size", "sampling_rate"}, "steps", "update"}


def test_norm_bounds_are_shrunk_as_dp_sgd_is_where_rows_share_a_cell() -> None:
    known = card_of_prices({"train": 480, "test": 100}, None, constant_share=0.1)
    bounded, clipped = (recipe(known, name, 1.0).settings for name in ("norm_bound_sgd", "dp_sgd"))
    assert bounded["shrink_share"] == 0.05 and bounded["update"] == clipped["update"]


@pytest.mark.parametrize(
    ("records", "epsilon", "momentum"),
    [
        ({"train": 5000, "test": 100}, 1.0, 0.9),
        ({"train": 37_300, "test": 100}, 1.0, 0.9),  # 10,000 standard deviations of a count, 3.73
        ({"train": 74_600, "test": 100}, 1.0, 0.95),  # 20,000
        ({"at_most": 3 * 74_600}, 1.0, 0.95),  # there may be a third of them
        ({"train": 10_000_000, "test": 100}, 1.0, 0.97),  # 30 of 300 steps
    ],
)
def test_steps_go_further_where_there_is_more_to_learn_of_classes(
    records: dict[str, int], epsilon: float, momentum: float
) -> None:
    known = card_of_prices(records, None)
    advised = recipe(known, "dp_sgd", epsilon)
    update = advised.settings["update"]
    assert explain_recipe(known, advised)["momentum"].startswith("of classes more, the more records there")
    assert update["momentum"] == momentum
    assert update["learning_rate"] == pytest.approx((1 + momentum) / 0.25, rel=0.03)
    of_a_number = recipe(card_of_prices(records, {}), "dp_sgd", epsilon).settings["update"]
    assert of_a_number["momentum"] == 0.9


def test_group_privacy_counts_as_that_many_fewer_records() -> None:
    """Noise for four records of a person is four times larger: 1,920 of them are as 480 of as many people."""
    person = {"column": "id", "per_person": 4, "group_privacy": True}
    of_groups = recipe(card_of_prices({"train": 1920, "test": 100}, {}, person), "dp_sgd", 1.0)
    assert of_groups.settings["update"]["noise_limit"] == 0.27 and of_groups.settings["shrink_share"] == 0.05
    assert of_groups.features["name"] == "target_scale"  # 1,920 records of as many people get histograms
    one_record = recipe(card_of_prices({"train": 1920, "test": 100}, {}), "dp_sgd", 1.0)
    assert one_record.settings["update"]["noise_limit"] == 0.34
    assert one_record.features["name"] == "histograms"


@pytest.mark.parametrize(
    ("records", "epsilon", "follows"),
    [
        ({"train": 2600, "test": 100}, 1.0, False),  # 697 standard deviations of a count, which are 3.73
        ({"train": 2620, "test": 100}, 1.0, True),
        ({"train": 2620, "test": 100}, 0.9, False),
        ({"at_most": 7800}, 1.0, False),  # of which a third is taken to be there
        ({"at_most": 7860}, 1.0, True),
    ],
)
def test_the_clip_norm_of_a_number_follows_its_errors_from_enough_records_on(
    records: dict[str, int], epsilon: float, follows: bool
) -> None:
    known = card_of_prices(records, {})
    advised = recipe(known, "dp_sgd", epsilon)
    assert advised.settings.get("error_share") == (0.001 if follows else None)
    assert ("how far errors have fallen" in explain_recipe(known, advised)["clip norm"]) == follows
    others: list[dict[str, Any] | None] = [None, {"counts": True}, {"quantile": 0.9}]
    for target in others:
        assert "error_share" not in recipe(card_of_prices(records, target), "dp_sgd", epsilon).settings


@pytest.mark.parametrize(
    ("records", "epsilon", "share"),
    [
        ({"train": 500, "test": 100}, 1.0, 0.05),
        ({"at_most": 3000}, 1.0, 0.05),
        ({"train": 1014, "test": 100}, 1.0, 0.05),  # 272 standard deviations of a count
        ({"train": 10_144, "test": 100}, 1.0, 0.005),
        ({"train": 10_000_000, "test": 100}, 1.0, 0.0001),
    ],
)
def test_models_are_shrunk_for_a_share_that_falls_with_their_records(
    records: dict[str, int], epsilon: float, share: float
) -> None:
    classes, number = card_of_prices(records, None, constant_share=0.1), card_of_prices(records, {})
    for known in (classes, number):
        advised = recipe(known, "dp_sgd", epsilon)
        assert advised.settings["shrink_share"] == share
        assert f"{share:.2%} of the squared mu" in explain_recipe(known, advised)["shrinkage"]
    assert recipe(classes, "dp_sgd", epsilon).settings["update"]["noise_limit"] >= 0.5
    # The mean has that share, too: squares of mu are inverse to those of the noise.
    noise = recipe(number, "dp_sgd", epsilon).features["mean_noise"]
    assert noise == pytest.approx(noise_for_share(1.0, epsilon) / math.sqrt(share), rel=5e-3)
    for other in (card_of_prices(records, None), card_of_prices(records, {"quantile": 0.9})):
        advised = recipe(other, "dp_sgd", epsilon)
        assert "shrink_share" not in advised.settings and "mean_noise" not in advised.features
