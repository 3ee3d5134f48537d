"""The estimators keep scikit-learn's contract, read nothing off the records, and say what fits cost together."""

import math
import pickle
import warnings
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pandas as pd
import pytest
from ruamel.yaml import YAML
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

import epsilonflow.sklearn
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.methods import from_settings
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import squared_error
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.gaussian import gaussian_delta
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.card import verify
from algorithms.privacy.ledger import Ledger
from data.card import data_card
from data.cells import CellSettings, usual_cells
from epsilonflow.sklearn import (
    FORBIDDEN_CHECKS,
    DPClassifier,
    DPRegressor,
    PrivacyCostWarning,
)
from epsilonflow.table_encoding import TableEncoding, encoding_of_schema, usual_method
from tests.support.cards import card, category, csv_of, label, number
from tests.support.costs import costs_once
from tests.support.engines import engines_once
from tests.support.refusals import refused_as

pytestmark = pytest.mark.usefixtures("brief_inspections")

__all__ = ["costs_once", "engines_once"]

SCHEMA = {"age": (0, 100), "job": ["clerk", "nurse", "smith"], "member": [False, True]}
FAST: dict[str, Any] = {"steps": 3, "epsilon": 50.0}


@pytest.fixture(autouse=True)
def no_fits_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(epsilonflow.sklearn, "_FITS", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyCostWarning)
        yield


def table(rows: int = 300, seed: int = 0) -> tuple[pd.DataFrame, pd.Series]:
    """A mixed table, and whether the age is above 50."""
    draw = np.random.default_rng(seed)
    age = draw.uniform(0, 100, rows)
    frame = pd.DataFrame(
        {"age": age, "job": draw.choice(SCHEMA["job"], rows), "member": draw.random(rows) < 0.5}
    )
    return frame, pd.Series(np.where(age > 50, "old", "young"), name="answer")


def numbers(rows: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(seed).uniform(-1, 1, (rows, 3))
    return X, (X[:, 0] > 0).astype(int)


FORBIDDEN = {
    *("check_classifier_data_not_an_array", "check_classifiers_classes", "check_classifiers_one_label"),
    *("check_classifiers_train", "check_fit_idempotent", "check_regressor_data_not_an_array"),
    *("check_regressors_int", "check_regressors_train", "check_supervised_y_2d"),
}


def test_the_checks_that_users_may_leave_out_are_those_that_fail_here() -> None:
    assert FORBIDDEN_CHECKS.keys() == FORBIDDEN


def _check(estimator: Any) -> None:
    passed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for copy, check in estimator_checks_generator(estimator):
            if check.func.__name__ not in FORBIDDEN:
                with suppress(SkipTest):
                    check(copy)
                    passed += 1
    assert passed >= 40


def test_a_classifier_passes_scikit_learns_checks_but_for_the_forbidden() -> None:
    _check(DPClassifier(bounds=(-10, 10), classes=[-1, 0, 1, 2, 3], **FAST))


@pytest.mark.soak
def test_a_regressor_passes_scikit_learns_checks_but_for_the_forbidden() -> None:
    _check(DPRegressor(bounds=(-10, 10), target_bounds=(-10, 10), **FAST))


@pytest.mark.usefixtures("same_secrets")
def test_a_mixed_table_is_learned_from_its_schema() -> None:
    X, y = table(2000)
    model = DPClassifier(epsilon=8, schema=SCHEMA, classes=["young", "old"], steps=60).fit(X, y)
    assert model.classes_.tolist() == ["old", "young"]
    assert model.score(X, y) > 0.9
    probabilities = model.predict_proba(X)
    assert probabilities.sum(axis=1) == pytest.approx(1)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(X)).all()
    assert model.epsilon_ == model.total_epsilon_ <= 8
    assert verify(model.result_.card, unsigned=True).passed


@pytest.mark.usefixtures("same_secrets")
def test_a_number_is_predicted_within_its_bounds() -> None:
    X, _ = table(1000)
    model = DPRegressor(epsilon=8, schema=SCHEMA, target_bounds=(0, 1), steps=60).fit(X, X["age"] / 100)
    assert model.score(X, X["age"] / 100) > 0.5
    assert model.predict(X.assign(age=1e9)).max() <= 1


def test_a_data_card_is_a_schema_and_declares_the_classes(tmp_path: Path) -> None:
    columns = csv_of(number("age", 0, 100), category("job", *SCHEMA["job"]), label("answer"))
    document = card("people", reader=columns, classes=["old", "young"], records={"at_most": 500})
    document["files"] = {"train": {"path": "train.csv", "keyed_sha256": "0" * 64}}
    document["split"] = {"salt": "s", "test_fraction": 0.3}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "people.yaml")
    X, y = table()
    for schema in (tmp_path / "people.yaml", data_card("people", tmp_path)):
        model = clone(DPClassifier(schema=schema, **FAST))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyCostWarning)
            model.fit(X, y)
        assert model.classes_.tolist() == ["old", "young"]


def test_settings_follow_from_the_kind_of_target() -> None:
    classes, number, count, quantile = (
        usual_method(5000, loss, 10, epsilon=1.0)
        for loss in ("cross_entropy", squared_error, CountLoss(), QuantileLoss(0.9))
    )
    assert (classes.update.noise_limit, number.update.noise_limit) == (0.7, 0.35)
    few = usual_method(480, "cross_entropy", 10, epsilon=1.0)
    assert (few.update.noise_limit, few.shrink_share) == (0.5, 0.05)
    few_numbers = usual_method(480, squared_error, 10, epsilon=1.0, has_constant=False)
    assert (few_numbers.update.noise_limit, few_numbers.shrink_share) == (0.27, 0.05)
    assert few_numbers.error_share is None
    assert [one.shrink_share for one in (classes, number, count, quantile)] == [0.01, 0.01, 0.01, None]
    assert [one.error_share for one in (classes, number, count, quantile)] == [None, 0.001, None, None]
    without = usual_method(480, "cross_entropy", 10, epsilon=1.0, has_constant=False)
    assert without.shrink_share is None
    assert without.update.noise_limit == 0.34  # 0.03 times the root of 480 / 3.73
    # 1.9 over the curvatures 1/2, 1, e and 5.
    rates = [one.update.learning_rate for one in (classes, number, count, quantile)]
    assert rates == [3.8, 1.9, 0.7, 0.38]


@pytest.mark.usefixtures("same_secrets")
def test_a_number_that_fills_little_of_its_bounds_is_predicted_on_a_released_scale() -> None:
    """Its deviation is a thirtieth of the bounds, and without a scale noise alone would be several times as much."""
    X, _ = table(3000)
    draw = np.random.default_rng(1)
    y = 20 + X["age"] / 10 + draw.normal(0, 1, 3000)
    model = DPRegressor(epsilon=1, schema=SCHEMA, target_bounds=(0, 200), steps=30).fit(X, y)
    assert model.score(X, y) > 0.5
    card = model.result_.card
    assert card.mechanism.features.name == "target_scale" and verify(card, unsigned=True).passed
    first = model.result_.trace.iloc[0]
    # 0.05 of the squared mu: a Gaussian mechanism of mu sqrt(20) / noise has the epsilon of the budget.
    mu = math.sqrt(20) / first["noise_std"]
    assert gaussian_delta(mu, 1.0) == pytest.approx(1e-5, rel=1e-3)
    assert model.epsilon_ <= 1


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize("loss", ["squared_error", "poisson"])
def test_a_number_without_anything_to_learn_is_predicted_about_as_well_as_by_its_mean(loss: str) -> None:
    X, _ = table(1500)
    y = np.random.default_rng(3).poisson(3.0, 3000)
    model = DPRegressor(epsilon=1, schema=SCHEMA, target_bounds=(0, 20), loss=loss, steps=100).fit(
        X, y[:1500]
    )
    assert model.score(X, y[1500:]) > -0.02  # -.04 without shrinking
    kinds = list(model.result_.trace["kind"])
    assert kinds == ["total", "total", *["gradient"] * 100, "total"]  # the histogram, the mean, the gain
    assert verify(model.result_.card, unsigned=True).passed and model.epsilon_ <= 1


def test_a_missing_number_and_an_unknown_category_are_values() -> None:
    encoding = encoding_of_schema(SCHEMA, CellSettings())
    rows = pd.DataFrame(
        {"age": [np.nan, 0.0, 50.0], "job": ["unheard of", "clerk", None], "member": [True, False, True]}
    )
    encoded = encoding.encode(rows)
    assert len({row.tobytes() for row in encoded}) == 3
    assert (encoding.encode(rows.iloc[:1]) == encoded[:1]).all()
    of_array, array = DPClassifier(bounds=(0, 100), classes=[0, 1])._encode(
        np.array([[np.nan], [0.0], [50.0]]), cells=CellSettings()
    )
    assert isinstance(of_array, TableEncoding)
    assert len({row.tobytes() for row in of_array.encode(array)}) == 3


@pytest.mark.parametrize(
    ("estimator", "arguments"),
    [
        (DPClassifier(classes=[0, 1]), ("bounds", "schema")),
        (DPClassifier(bounds=(-1, 1)), ("classes",)),
        (DPRegressor(bounds=(-1, 1)), ("target_bounds",)),
        (DPClassifier(bounds=(-1, 1), classes=[0]), ("classes",)),
        (DPClassifier(bounds=(-1, 1), classes=[0, 2]), ("y", "classes")),
        (DPClassifier(bounds=(1, -1), classes=[0, 1]), ("bounds",)),
        (DPClassifier(bounds=([0, 0], 1), classes=[0, 1]), ("bounds",)),
        (DPClassifier(schema={"age": (0, 1)}, classes=[0, 1]), ("X", "schema")),
        (DPRegressor(bounds=(-1, 1), target_bounds=(2, 1)), ("target_bounds",)),
    ],
)
def test_what_is_not_declared_is_refused_by_its_argument(estimator: Any, arguments: tuple[str, ...]) -> None:
    with refused_as("bad_argument", arguments=arguments):
        estimator.fit(*numbers())


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({}, ("schema",)),
        ({"age": 7}, ("schema",)),
        ({"age": (0, 1), "shoe size": (0, 1)}, ("X", "schema")),
        ({"age": {"kind": "numeric", "bounds": (0, 1), "missing": "refuse"}}, ("X",)),
        ({"job": (0, 1)}, ("X",)),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_without_a_value(
    schema: Any, arguments: tuple[str, ...]
) -> None:
    X, y = table()
    X.loc[3, "age"] = np.nan
    with refused_as("bad_argument", arguments=arguments) as refusal:
        DPClassifier(schema=schema, classes=["old", "young"], **FAST).fit(X, y)
    assert "smith" not in str(refusal.value)


@pytest.mark.parametrize(
    ("X", "y", "argument"),
    [
        (np.array([["1"], ["secret"]], object), [0, 1], "X"),
        (np.array([[1j], [31337j]]), [0, 1], "X"),
        (np.array([31337.0, 1.0]), [0, 1], "X"),
        (np.zeros((2, 1)), ["0", "secret"], "y"),
        (np.zeros((2, 1)), [31337j, 1], "y"),
        (np.zeros((2, 1)), [None, 1], "y"),
    ],
)
@pytest.mark.parametrize("predicts", ["class", "number"])
def test_no_message_about_records_quotes_one(X: Any, y: Any, argument: str, predicts: str) -> None:
    declared = {"bounds": (-1, 1)} | FAST
    number = DPRegressor(target_bounds=(0, 1), **declared)
    estimator = DPClassifier(classes=[0, 1], **declared) if predicts == "class" else number
    with pytest.raises(ValueError, match=argument) as refusal:
        estimator.fit(X, y)
    shown: BaseException | None = refusal.value
    while shown is not None:
        assert "secret" not in str(shown) and "31337" not in str(shown)
        shown = None if shown.__suppress_context__ else shown.__context__


def test_numbers_beside_words_for_missing_ones_are_read_one_by_one() -> None:
    encoding = encoding_of_schema({"age": (0, 100)}, CellSettings())
    mixed = pd.DataFrame({"age": [30, "N/A", 0.1, "40", None, Decimal("12.5"), True, pd.NA, np.inf]})
    plain = pd.DataFrame({"age": [30, np.nan, 0.1, 40, np.nan, 12.5, 1, np.nan, 100]})
    assert (encoding.encode(mixed) == encoding.encode(plain)).all()
    for bad in ("secret", ["secret"]):
        with refused_as("bad_argument", arguments=("X",)) as refusal:
            encoding.encode(pd.DataFrame({"age": [1, bad]}))
        assert "'age'" in str(refusal.value) and "secret" not in str(refusal.value)


def test_whole_numbers_that_no_float_holds_are_at_the_nearest_bound_or_refused() -> None:
    beyond = pd.DataFrame({"age": [10**400, -(10**400), 7]}, dtype=object)
    encoding = encoding_of_schema({"age": (0, 100)}, CellSettings())
    assert (encoding.encode(beyond) == encoding.encode(pd.DataFrame({"age": [100, 0, 7]}))).all()
    of_texts = encoding_of_schema({"age": ["7", "8"]}, CellSettings())
    with refused_as("bad_argument", arguments=("X",)) as refusal:
        of_texts.encode(beyond)
    assert "'age'" in str(refusal.value) and "000" not in str(refusal.value)


def test_rows_without_any_and_columns_of_one_name_are_refused_as_such() -> None:
    encoding = encoding_of_schema({"age": (0, 100)}, CellSettings())
    rows = pd.DataFrame({"age": [30.0]})
    for bad, words in ((rows[:0], "0 rows"), (pd.concat([rows, rows], axis=1), "several columns 'age'")):
        with refused_as("bad_argument", arguments=("X",)) as refusal:
            encoding.encode(bad)
        assert words in str(refusal.value)


def test_days_and_arrays_of_categories_are_declared_as_they_are() -> None:
    first, last = date(2020, 1, 1), pd.Timestamp("2020-12-31")
    written: dict[str, Any] = {"seen": ("2020-01-01", "2020-12-31"), "job": ["1", "2"]}
    cells = CellSettings()
    assert encoding_of_schema({"seen": (first, last), "job": np.array([1, 2])}, cells) == encoding_of_schema(
        written, cells
    )


def test_a_column_is_declared_by_lists_as_by_tuples() -> None:
    declared: dict[str, dict[str, Any]] = {
        "age": {"kind": "numeric", "bounds": (0, 90), "missing": 40.0},
        "seen": {"kind": "timestamp", "bounds": ("2020-01-01", "2020-12-31")},
        "job": {"kind": "categorical", "categories": ("nurse", "smith")},
        "height": {"kind": "binned", "edges": (1.5, 1.8)},
    }
    as_lists: dict[str, Any] = {
        name: {key: list(one) if isinstance(one, tuple) else one for key, one in column.items()}
        for name, column in declared.items()
    }
    cells = usual_cells("classes", classes=2, records=500)
    assert encoding_of_schema(as_lists, cells) == encoding_of_schema(declared, cells)


def test_a_saved_estimator_keeps_no_name_of_a_column_that_is_not_declared() -> None:
    """One of `pd.get_dummies` is a value of a record."""
    X, y = table()
    fitted = DPClassifier(schema=SCHEMA, classes=["old", "young"], **FAST).fit(X.assign(job_astronaut=0), y)
    assert b"astronaut" not in pickle.dumps(fitted)
    assert (fitted.predict(X.assign(job_pilot=1)) == fitted.predict(X)).all()


def test_a_refusal_names_parameters_that_estimators_have() -> None:
    """`fit` would name its accountant, which is not theirs."""
    estimator = DPClassifier(delta=0.0, bounds=(-1, 1), classes=[0, 1], **FAST)
    with refused_as("delta_of_accountant") as refusal:
        estimator.fit(*numbers())
    assert refusal.value.code == "delta_of_accountant"


def test_fits_add_up_and_say_so_from_the_second_on() -> None:
    X, y = numbers()
    model = DPClassifier(bounds=(-1, 1), classes=[0, 1], **FAST).fit(X, y)
    first = model.epsilon_
    with pytest.warns(
        PrivacyCostWarning, match=r"2 fits .* epsilon (100|99\.[0-9]+) at delta 2e-05.*`epsilonflow tune`"
    ):
        model.fit(X, y)
    assert model.total_epsilon_ == pytest.approx(2 * first)
    assert not hasattr(clone(model), "total_epsilon_")
    # other columns: no warning
    other = DPClassifier(bounds=(-1, 1), classes=[0, 1], **FAST).fit(X[:, :2], y)
    assert other.total_epsilon_ == pytest.approx(first, rel=1e-3)


def test_the_warning_says_nothing_of_which_records_two_fits_share() -> None:
    """It would tell whether somebody is in a table."""
    (X, y), (other, _) = numbers(), numbers(seed=1)
    told = []
    for columns, second in (([0, 1, 2], X), ([0, 1], other[:, :2])):
        model = DPClassifier(bounds=(-1, 1), classes=[0, 1], **FAST).fit(X[:, columns], y)
        with pytest.warns(PrivacyCostWarning) as said:
            model.fit(second, y)
        told.append(str(said[-1].message))
    assert told[0] == told[1]


def test_the_sum_of_fits_is_never_below_what_they_cost() -> None:
    with pytest.warns(PrivacyCostWarning, match=r"cost epsilon 3\.001 at delta 3\.001e-05 together"):
        DPClassifier._warn_of_sum([Budget(1.00001, 1.00001e-5)] * 3)
    with pytest.warns(PrivacyCostWarning, match=r"cost epsilon 0\.3 at delta 3e-05 together"):
        DPClassifier._warn_of_sum([Budget(0.1, 1e-5)] * 3)


@pytest.mark.parametrize(
    ("owner", "name", "error"), [(Barrier, "gradient", KeyboardInterrupt), (Ledger, "settle", RefusedError)]
)
def test_a_fit_that_fails_after_its_charge_is_part_of_the_total(
    owner: type, name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error("it broke")

    X, y = numbers()
    model = DPClassifier(bounds=(-1, 1), classes=[0, 1], **FAST)
    with refused_as("bad_argument", arguments=("y", "classes")):
        model.fit(X, y + 1)
    assert not hasattr(model, "total_epsilon_")  # refused before its charge
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(owner, name, broken)
        model.fit(X, y)
    assert 0.99 * FAST["epsilon"] <= model.total_epsilon_ <= FAST["epsilon"]
    with pytest.warns(PrivacyCostWarning, match="2 fits .* epsilon (100|99)"):
        model.fit(X, y)
    assert 1.98 * FAST["epsilon"] <= model.total_epsilon_ <= 2 * FAST["epsilon"]


@pytest.mark.parametrize(
    "settings", [{"name": "dp_agd"}, {"name": "dpis", "epochs": 1, "expected_batch_size": 20}]
)
def test_a_method_that_chooses_its_releases_on_the_way_costs_what_its_filter_allows(settings: Any) -> None:
    model = DPClassifier(epsilon=3, bounds=(-1, 1), classes=[0, 1], method=from_settings(settings))
    model.fit(*numbers())
    assert model.epsilon_ == model.total_epsilon_ == model.result_.epsilon["rdp"] <= 3


def test_cross_validation_and_a_grid_say_what_they_cost() -> None:
    X, y = numbers()
    model = DPClassifier(bounds=(-1, 1), classes=[0, 1], **FAST)
    with pytest.warns(PrivacyCostWarning) as said:
        cross_val_score(model, X, y, cv=4)
    assert "4 fits" in str(said[-1].message)
    grid = GridSearchCV(model, {"steps": [2, 3]}, cv=3)
    with pytest.warns(PrivacyCostWarning) as said:
        grid.fit(X, y)
    assert "11 fits" in str(said[-1].message)  # 4 of before, 2 times 3, and the last one on all records


def test_a_pipeline_holds_it() -> None:
    X, y = numbers()
    pipeline = make_pipeline(FunctionTransformer(np.abs), DPClassifier(bounds=(0, 1), classes=[0, 1], **FAST))
    assert pipeline.fit(X, y).predict_proba(X).shape == (200, 2)


def test_a_population_pays_and_refuses_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path))
    X, y = numbers()
    model = DPClassifier(
        bounds=(-1, 1), classes=[0, 1], epsilon=2.0, steps=3, population="visits", cap=(3.0, 1e-4)
    )
    model.fit(X, y)
    with pytest.raises(BudgetRefusedError):
        model.fit(X, y)
    assert model.total_epsilon_ <= 2.0
