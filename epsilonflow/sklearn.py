"""Differentially private estimators with the interface of scikit-learn: `DPClassifier` and `DPRegressor`.

A linear model of a public encoding of the rows, trained by `fit`. What scikit-learn reads off the records has to be
declared here, since reading it would reveal single records: bounds of numbers, categories, classes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from algorithms.errors import RefusedError
from algorithms.fitting import Fitted
from algorithms.fitting import fit as train
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import MARGINS, squared_error
from algorithms.models.saved import TrainedModel
from algorithms.models.saved import load as load_model
from algorithms.noise_limits import OutputKind, target_share
from algorithms.privacy.accounting import Budget, rounded_up
from algorithms.privacy.card import load_beside
from algorithms.privacy.card.text import statement
from data.cells import CellSettings, usual_cells
from data.preparation import target_in
from data.targets import Number
from epsilonflow.sklearn_refusals import ESTIMATORS
from epsilonflow.table_encoding import (
    PreparedRecords,
    TableEncoding,
    declared_card,
    encoding_of_bounds,
    encoding_of_model,
    encoding_of_schema,
    usual_method,
)

__all__ = ["FORBIDDEN_CHECKS", "DPClassifier", "DPRegressor", "PrivacyCostWarning", "load"]

_DECLARED = "classes are declared, and reading them off y would reveal single records"
_NOISE = "every fit draws secret noise anew, so two fits differ"
_ONE_LABEL = "noise may name another of the declared classes, also where y holds a single one"
_SCORE = "with a few hundred rows, clipping and noise are most of what is learned, and no score is promised"
FORBIDDEN_CHECKS: dict[str, str] = {
    "check_classifiers_classes": _DECLARED,
    "check_classifiers_train": _DECLARED,
    "check_classifiers_one_label": _ONE_LABEL,
    "check_fit_idempotent": _NOISE,
    "check_supervised_y_2d": _NOISE,
    "check_classifier_data_not_an_array": _NOISE,
    "check_regressor_data_not_an_array": _NOISE,
    "check_regressors_int": _NOISE,
    "check_regressors_train": _SCORE,
}
"""The checks of scikit-learn's `check_estimator` that privacy forbids to pass, and why."""


_LOSSES: Mapping[str, Callable[[float], Any]] = {
    "squared_error": lambda _: squared_error,
    "poisson": lambda _: CountLoss(),
    "quantile": QuantileLoss,
}


class PrivacyCostWarning(UserWarning):
    """Several fits on tables of the same columns, whose costs add up where they share records."""


_FITS: dict[tuple[str, ...], list[Budget]] = {}
"""By the columns of a table, what fits of this process cost, also those of clones, as cross-validation makes them."""


_QUOTING = {
    "could not convert": "{argument} holds something that is no number; give numbers.",
    "Complex data": "Complex data not supported: {argument} holds complex numbers; give real ones.",
    "Expected 2D array": "{argument} is no table. Expected 2D array, of a row for each record. Reshape your data by"
    " reshape(-1, 1) if it has a single column, or by reshape(1, -1) if it is a single row.",
}
"""By their words, messages of scikit-learn and NumPy that quote values of records, and what is said instead."""


@contextmanager
def _no_value_in_a_message(argument: str) -> Iterator[None]:
    """Raise RefusedError in place of an error that would show values of records."""
    try:
        yield
    except ValueError as error:
        sentence = next((words for quoting, words in _QUOTING.items() if quoting in str(error)), None)
        if sentence is None:
            raise
        raise RefusedError(sentence, code="bad_argument", argument=argument, arguments=(argument,)) from None


@dataclass(frozen=True)
class _Released:
    """What a model that was trained elsewhere has in place of the result of a fit."""

    model: TrainedModel


class _DPEstimator(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    _kind: ClassVar[OutputKind]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # secret noise
        tags.input_tags.allow_nan = True
        return tags

    def _encode(
        self, X: Any, *, cells: CellSettings | None = None
    ) -> tuple[TableEncoding | PreparedRecords, Any]:
        """The declared encoding, and X as a table of its columns. cells: of a new encoding; None for that of `fit`."""
        reset = cells is not None
        if self.schema is not None:
            if not reset and not hasattr(self, "n_features_in_"):  # of `load`, whose encoding checks X
                return self.encoding_, X
            encoding = self.encoding_ if cells is None else encoding_of_schema(self.schema, cells)
            assert isinstance(encoding, TableEncoding)
            # The names of others, which a record may have chosen, are not kept.
            X = encoding.declared_columns(X)
            _check_feature_names(self, X, reset=reset)
            _check_n_features(self, X, reset=reset)
            return encoding, X
        if self.bounds is None:
            raise RefusedError(
                "neither bounds nor schema were given, and reading the range of a column off the records would reveal"
                " single ones; give bounds=(low, high) for an array, or schema= for a DataFrame, from what you know"
                " without looking.",
                code="bad_argument",
                arguments=("bounds", "schema"),
            )
        with _no_value_in_a_message("X"):
            numbers = validate_data(self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan")
        encoding = (
            self.encoding_ if cells is None else encoding_of_bounds(self.bounds, numbers.shape[1], cells)
        )
        return encoding, pd.DataFrame(numbers, columns=[str(k) for k in range(numbers.shape[1])])

    def _fit(self, X: Any, target: NDArray[Any], outputs: int, loss: Any) -> Self:
        """Train on a checked target and remember the cost."""
        cells = usual_cells(self._kind, classes=max(2, outputs), records=len(target))
        encoding, table = self._encode(X, cells=cells)
        assert isinstance(encoding, TableEncoding)
        records = encoding.encode(table)
        if len(records) != len(target):
            raise RefusedError(
                "X has {records} rows and y {labels}: inconsistent numbers of samples; give as many.",
                code="bad_argument",
                records=len(records),
                labels=len(target),
                arguments=("X", "y"),
            )
        method = self.method or usual_method(
            len(records), loss, self.steps, self.epsilon, has_constant=encoding.has_constant
        )
        try:
            with ESTIMATORS.wording_errors():
                result: Fitted = train(
                    encoding.network(outputs),
                    loss,
                    records,
                    target,
                    method=method,
                    epsilon=self.epsilon,
                    delta=self.delta,
                    dataset=self.dataset,
                    one_row_per_unit=self.one_row_per_unit,
                    population=self.population,
                    cap=self.cap,
                    ledger=self.ledger,
                    device=self.device,
                    target_scale=target_share(len(records), self.epsilon) if self._kind == "number" else None,
                )
        except BaseException as error:
            if isinstance(charged := getattr(error, "charged", None), Budget):
                self._add_cost(table, charged)
            raise
        self.encoding_: TableEncoding | PreparedRecords = encoding
        self.result_: Fitted | _Released = result
        # What each accountant states is a bound.
        self.epsilon_, self.delta_ = float(min(result.epsilon.values())), result.delta
        self._warn_of_sum(self._add_cost(table, Budget(self.epsilon_, self.delta_)))
        return self

    def _add_cost(self, table: pd.DataFrame, cost: Budget) -> Sequence[Budget]:
        """Add a fit to what this estimator cost; returns all fits of this process on tables of the same columns.

        Whether they share rows is not checked: a warning that depends on it would reveal records.
        """
        self.total_epsilon_ = getattr(self, "total_epsilon_", 0.0) + cost.epsilon
        costs = _FITS.setdefault(tuple(table.columns), [])
        costs.append(cost)
        return costs

    @staticmethod
    def _warn_of_sum(costs: Sequence[Budget]) -> None:
        """Warn of several fits on tables of the same columns."""
        if len(costs) > 1:
            epsilon, delta = (
                float(rounded_up(float(sum(Decimal(repr(number)) for number in numbers))))
                for numbers in zip(*((cost.epsilon, cost.delta) for cost in costs), strict=True)
            )
            warnings.warn(
                f"{len(costs)} fits of this process were on tables of these columns: on the same records they cost"
                f" epsilon {epsilon:g} at delta {delta:g} together, as each fit of a search or of a cross-validation is"
                " paid for by itself. To choose settings for one price, use `epsilonflow tune`; to hold all fits to a"
                " budget, give population=.",
                PrivacyCostWarning,
                stacklevel=4,
            )

    def _outputs(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self, "result_")
        encoding, table = self._encode(X)
        with torch.no_grad():
            scores = self.result_.model(torch.from_numpy(encoding.encode(table)))
        return np.asarray(scores.double().numpy(), np.float64)


class DPClassifier(ClassifierMixin, _DPEstimator):  # type: ignore[misc]
    """A classifier of tables that is trained under differential privacy.

    With few records it is shrunk towards the released class frequencies, as far as its gain on them is not certain.

    Args:
        epsilon: Of one fit; each fit is paid for by itself.
        delta: Of one fit, at most 1/n.
        schema: For DataFrames, what is known of the columns without looking: a mapping of each to (low, high) or a list
            of its categories; or a data card, its name or its file, which also declares the classes.
        bounds: For arrays, (low, high) of all columns, or of each.
        classes: All classes that there can be.
        steps: Of DP-SGD, if no method is given.
        method: Settings of a method, such as `DPSGD(steps=300, expected_batch_size=256)`.
        dataset: The name of the records on the card.
        one_row_per_unit: Your statement that nobody has more than one row; see `epsilonflow.fit`.
        population: Whose budget in a ledger each fit charges. cap, ledger: as in `epsilonflow.fit`.
        device: As in `epsilonflow.fit`.

    Attributes:
        classes_: The declared classes, sorted.
        epsilon_, delta_: What the last fit cost.
        total_epsilon_: What all fits of this estimator cost together, with those that failed after their charge.
        result_: What `epsilonflow.fit` returned: the card, the trace, the module.

    Example:
        >>> import numpy as np
        >>> from epsilonflow.sklearn import DPClassifier
        >>> draw = np.random.default_rng(0)
        >>> X = draw.uniform(-1, 1, size=(400, 3))
        >>> y = np.where(X[:, 0] > 0, "yes", "no")
        >>> model = DPClassifier(epsilon=5, bounds=(-1, 1), classes=["no", "yes"], steps=20).fit(X, y)
        >>> model.total_epsilon_ <= 5, model.predict_proba(X).shape
        (True, (400, 2))
    """

    _kind = "classes"

    def __init__(  # noqa: PLR0913
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        schema: Any = None,
        bounds: Any = None,
        classes: Sequence[Any] | None = None,
        steps: int = 100,
        method: Any = None,
        dataset: str = "in_memory",
        one_row_per_unit: bool = False,
        population: str | None = None,
        cap: tuple[float, float] | None = None,
        ledger: str | None = None,
        device: str = "auto",
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.schema = schema
        self.bounds = bounds
        self.classes = classes
        self.steps = steps
        self.method = method
        self.dataset = dataset
        self.one_row_per_unit = one_row_per_unit
        self.population = population
        self.cap = cap
        self.ledger = ledger
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        """Train; the cost is added to `total_epsilon_`, and charged to the population if there is one.

        Raises RefusedError where something is not declared or does not fit, before anything is spent.
        """
        self._encode(X, cells=CellSettings())  # errors in X are reported before those in y
        if y is None:
            raise RefusedError(
                "the estimator requires y to be passed, but the target y is None; give the class of each row.",
                code="bad_argument",
                arguments=("y",),
            )
        with _no_value_in_a_message("y"):
            y = column_or_1d(y, warn=True)
        if pd.isna(y).any():
            raise RefusedError(
                "y contains NaN, None or another missing value; leave these records out.",
                code="bad_argument",
                arguments=("y",),
            )
        check_classification_targets(y)
        self.classes_ = np.unique(np.asarray(self._declared_classes()))
        if len(self.classes_) < 2:
            raise RefusedError(
                "classes are fewer than two; give all that there can be.",
                code="bad_argument",
                arguments=("classes",),
            )
        indices = pd.Index(self.classes_).get_indexer(pd.Index(y))
        if (indices < 0).any():
            raise RefusedError(
                "y has a value that is none of the declared classes; give all in classes=.",
                code="bad_argument",
                arguments=("y", "classes"),
            )
        return self._fit(X, indices.astype(np.int64), len(self.classes_), "cross_entropy")

    def _declared_classes(self) -> Sequence[Any]:
        if self.classes is not None:
            return self.classes
        if self.schema is not None and not isinstance(self.schema, dict):
            return declared_card(self.schema).classes
        raise RefusedError(
            "classes were not given, and reading them off y would reveal the only record of a class; give classes=,"
            " all that there can be.",
            code="bad_argument",
            arguments=("classes",),
        )

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each class, [n, classes]."""
        scores = self._outputs(X)
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row."""
        indices = self._outputs(X).argmax(axis=1)
        return np.asarray(self.classes_[indices])


class DPRegressor(RegressorMixin, _DPEstimator):  # type: ignore[misc]
    """A regression of tables that is trained under differential privacy.

    A twentieth of the squared mu of the budget goes to a release of the target's centre and scale before training, as
    in a run of the pipeline; the card lists it.

    Args:
        target_bounds: (low, high) of the target, to which it and predictions are clamped; from what you know without
            looking. A data card as `schema` may declare them instead.
        loss: "squared_error" for the mean, "poisson" for the mean of counts, "quantile" for a quantile.
        quantile: Its level.

    The other arguments and the attributes are those of `DPClassifier`.

    Example:
        >>> import numpy as np
        >>> from epsilonflow.sklearn import DPRegressor
        >>> X = np.random.default_rng(0).uniform(0, 1, size=(400, 2))
        >>> model = DPRegressor(epsilon=5, bounds=(0, 1), target_bounds=(0, 2), steps=20).fit(X, X.sum(axis=1))
        >>> bool(model.predict(X).max() <= 2)
        True
    """

    _kind = "number"

    def __init__(  # noqa: PLR0913
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        schema: Any = None,
        bounds: Any = None,
        target_bounds: tuple[float, float] | None = None,
        loss: str = "squared_error",
        quantile: float = 0.5,
        steps: int = 100,
        method: Any = None,
        dataset: str = "in_memory",
        one_row_per_unit: bool = False,
        population: str | None = None,
        cap: tuple[float, float] | None = None,
        ledger: str | None = None,
        device: str = "auto",
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.schema = schema
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.loss = loss
        self.quantile = quantile
        self.steps = steps
        self.method = method
        self.dataset = dataset
        self.one_row_per_unit = one_row_per_unit
        self.population = population
        self.cap = cap
        self.ledger = ledger
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        """Train, as `DPClassifier.fit` does.

        Raises RefusedError also for numbers to predict that are missing or infinite.
        """
        self._encode(X, cells=CellSettings())
        if y is None:
            raise RefusedError(
                "the estimator requires y to be passed, but the target y is None; give the number of each row.",
                code="bad_argument",
                arguments=("y",),
            )
        try:
            with _no_value_in_a_message("y"):
                numbers = np.asarray(column_or_1d(y, warn=True), np.float64)
        except TypeError:
            raise RefusedError(
                "y holds something that is no number; give numbers.", code="bad_argument", arguments=("y",)
            ) from None
        if not np.isfinite(numbers).all():
            raise RefusedError(
                "y contains NaN or infinity; leave these records out.", code="bad_argument", arguments=("y",)
            )
        self.target_ = self._declared_target()
        return self._fit(X, self.target_.scale(numbers), 1, _LOSSES[self._check_loss()](self.quantile))

    def _check_loss(self) -> str:
        """The loss; raises RefusedError for another name, or a target that does not fit it."""
        if self.loss not in _LOSSES:
            raise RefusedError(
                "the loss is {loss!r}; choose one of {choices}.",
                code="bad_argument",
                loss=self.loss,
                choices=", ".join(_LOSSES),
                arguments=("loss",),
            )
        if self.loss == "quantile" and not 0.0 < self.quantile < 1.0:
            raise RefusedError(
                "quantile is {quantile!r}; give a number between 0 and 1, such as 0.9.",
                code="bad_argument",
                quantile=self.quantile,
                arguments=("quantile",),
            )
        if self.loss == "poisson" and self.target_.bounds[0] != 0.0:
            raise RefusedError(
                "the Poisson loss is of counts, which begin at 0; give target_bounds=(0, high).",
                code="bad_argument",
                arguments=("target_bounds", "loss"),
            )
        return str(self.loss)

    def _declared_target(self) -> Number:
        if self.target_bounds is None and self.schema is not None and not isinstance(self.schema, dict):
            target = declared_card(self.schema).target
            if isinstance(target, Number):
                return target
        if self.target_bounds is None:
            raise RefusedError(
                "target_bounds were not given, and reading the range of y off the records would reveal single ones;"
                " give target_bounds=(low, high), from what you know without looking.",
                code="bad_argument",
                arguments=("target_bounds",),
            )
        try:
            low, high = map(float, self.target_bounds)
            return Number(bounds=(low, high))
        except (TypeError, ValueError):
            raise RefusedError(
                "target_bounds are no interval; give (low, high) with low below high.",
                code="bad_argument",
                arguments=("target_bounds",),
            ) from None

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The predicted number of each row, within the target's bounds."""
        check_is_fitted(self, "result_")
        return self.target_.in_units(self._outputs(X)[:, 0])


def load(path: str | Path) -> DPClassifier | DPRegressor:
    """A model that the pipeline trained, as a fitted estimator.

    One of a table predicts on DataFrames with the columns that its data card declares, prepared as the model's file
    says. One of images or texts takes prepared records as an array; `encoding_.encoder` names the public encoder and
    the digest of its weights. In a `Pipeline` put it into `sklearn.frozen.FrozenEstimator`.

    Args:
        path: Of the model's file, or of a folder with it, such as `artifacts` or a release.

    Returns:
        The estimator, whose `card_` is the privacy card beside the model, or None. A UserWarning says so if the model
        is not private, or has no card.

    Raises:
        RefusedError: If its target is no class and no number, or its scores are no log-probabilities.
    """
    model = load_model(path)
    encoding = encoding_of_model(model)
    estimator: DPClassifier | DPRegressor
    target = target_in(model.target)
    if isinstance(target, Number):
        estimator = DPRegressor(schema=encoding)
        estimator.target_ = target
    elif model.predicts == "class" and model.facts.model not in MARGINS:
        estimator = DPClassifier(schema=encoding, classes=list(model.classes))
        estimator.classes_ = np.asarray(model.classes)
    else:
        raise RefusedError(
            "the model predicts {predicts}, or gives margins in place of probabilities; use `epsilonflow"
            " predict`.",
            code="model_unfit",
            predicts=model.predicts,
        )
    estimator.encoding_, estimator.result_ = encoding, _Released(model)
    estimator.card_ = load_beside(Path(path))
    if estimator.card_ is None:
        warnings.warn("No privacy card is beside the model, so nothing is promised.", stacklevel=2)
    elif not estimator.card_.setting.private:
        warnings.warn(statement(estimator.card_), stacklevel=2)
    return estimator
