"""How held-out metrics are worded: their names and units, the headline of each kind of target, and its texts.

They are computed in `algorithms.evaluation` and `tasks.evaluate`; `metrics_document` has their fields.

Metrics of private held-out records are estimates with their intervals, or None where noise drowns them; each text says
so, with the epsilon of the people held out.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from markupsafe import escape

from data.targets import LabelType, Number, TargetKind
from tasks.runs.metrics_document import (
    ClassRow,
    DecisionRow,
    EstimateRow,
    GroupRow,
    Metrics,
    PrivateMetrics,
    PublicMetrics,
    ThresholdRow,
    is_private,
)

TextRows = list[tuple[str, str]]
ACCURACY = "accuracy"
_MAX_RARE = 3
_SHARES = (
    ACCURACY, "precision", "recall", "selected", "positive_rate", "share", "coverage", "r2", "d2", "pinball_explained",
    "calibration_error", "calibration_gap",
)  # fmt: skip
"""How the names of metrics end that are shown in percent."""
_IN_UNITS = ("rmse", "mae", "mean_rmse")
_ABBREVIATIONS = re.compile(r"\b(auc|d2|f1|mae|r2|rmse)\b")


@dataclass(frozen=True)
class ReportText:
    """The texts of a page about a model on held-out records.

    tile, tile_note: the headline number, and what it is. sentences: about all metrics. warning: if the model is no
    better than the baseline, else None. captions: of the figures per_class and confusion."""

    tile: str
    tile_note: str
    sentences: str
    warning: str | None
    captions: tuple[str, str]


def metric_units(name: str, label_type: LabelType) -> float:
    """What a metric of a number that is scaled to [-1, 1] is multiplied by, to be in the number's own units; else 1."""
    if not isinstance(label_type, Number) or name not in _IN_UNITS:
        return 1.0
    return (label_type.bounds[1] - label_type.bounds[0]) / 2


def interval(accuracy: float, records: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an accuracy on this number of held-out records."""
    # The ends p of |p - accuracy| = z sqrt(p (1 - p) / records), a quadratic equation (Wilson 1927).
    z = 1.96
    middle = (accuracy + z**2 / (2 * records)) / (1 + z**2 / records)
    spread = (
        z / (1 + z**2 / records) * math.sqrt(accuracy * (1 - accuracy) / records + z**2 / (4 * records**2))
    )
    return middle - spread, middle + spread


def verdict(accuracy: float, majority: float, records: int) -> str:
    """How an accuracy compares with always predicting the most frequent class of the same held-out records."""
    if accuracy <= majority:
        how = "no better than"
    else:
        how = "better than" if interval(accuracy, records)[0] > majority else "not clearly better than"
    return f"{how} always naming the most frequent class"


def headline_metric(metrics: Metrics) -> float:
    """The metric by which models are compared, larger is better: the headline of its kind; NaN if noise drowns it."""
    estimate = headline_estimate(metrics)
    return math.nan if estimate is None else estimate[0]


def headline_estimate(metrics: Metrics) -> tuple[float, float, float] | None:
    """This metric with its interval, which is a point for public records; None where noise drowns it."""
    name = _headline(metrics)
    if is_private(metrics):
        estimate = _estimate(metrics, name)
        return None if estimate is None else (estimate["value"], estimate["low"], estimate["high"])
    value = _number(metrics, name)
    return None if value is None else (value,) * 3


def _estimate(metrics: PrivateMetrics, name: str) -> EstimateRow | None:
    """The estimate of this name; None where noise drowns it."""
    estimate = metrics.get(name)
    return cast(EstimateRow | None, estimate)


def _number(metrics: PublicMetrics, name: str) -> float | None:
    """The metric of this name; None if it is not known, as an AUC without records of a class."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


def metric_name(metrics: Metrics) -> str:
    """The name of this metric, such as "accuracy" or "micro F1"."""
    return metric_words(_headline(metrics))


def metric_words(key: str) -> str:
    """A metric's key as text, such as "positive F1" for test_positive_f1."""
    words = key.removeprefix("test_").replace("_", " ")
    return _ABBREVIATIONS.sub(lambda match: match[0].upper(), words)


def is_share(of: str) -> bool:
    """Whether the metric `of` is shown in percent: an accuracy, a share of records or of what is explained."""
    return of.replace(" ", "_").lower().endswith(_SHARES)


def format_metric(value: float, of: str, digits: int = 2) -> str:
    """A value of the metric `of` as text: a share in percent with `digits` decimals, others with three decimals."""
    if math.isnan(value):
        return "unknown, as noise drowns it"
    return percent(value, digits) if is_share(of) else f"{value:.3f}"


def format_difference(value: float, of: str) -> str:
    """A difference or an error of the metric `of` as text: of a share in percentage points, without the word."""
    return f"{100 * value:.2f}" if is_share(of) else f"{value:.3f}"


def describe_metric(metrics: Metrics) -> str:
    """The metric with its name, such as "accuracy 91.20%" or "micro F1 0.731"; a private one with its interval."""
    name, shown = metric_name(metrics), f"{format_metric(headline_metric(metrics), metric_name(metrics))}"
    if not is_private(metrics) or (estimate := headline_estimate(metrics)) is None:
        return f"{name} {shown}"
    low, high = (format_metric(end, name) for end in estimate[1:])
    return f"{name} {shown} ({low} to {high})"


def tracker_key(metrics: Metrics) -> str:
    """The name of the metric for a tracker, such as test/accuracy."""
    return _headline(metrics).replace("_", "/", 1)


def metric_rows(metrics: Metrics) -> TextRows:
    """The metrics for a terminal, as pairs of a name and a text."""
    rows = _private_rows(metrics) if is_private(metrics) else _kind_in(metrics).rows(metrics)
    shrunk = [("shrinkage", text)] if (text := _shrinkage_text(metrics)) else []
    return rows + shrunk + _uneven_rows(metrics)


def _shrinkage_text(metrics: Metrics) -> str:
    """How much of a training was kept, by the gain that was released after it; empty without a shrinkage."""
    if "shrinkage" not in metrics:
        return ""
    shrinkage = metrics["shrinkage"]
    gain, share, predicts = shrinkage["gain"], shrinkage["kept"], shrinkage["predicts"]
    constant, released = (
        (f"the {'class' if predicts == 'class' else 'label'} frequencies", "the released frequencies are")
        if predicts in ("class", "labels")
        else ("the released mean", "the released mean is")
    )
    did = "gained" if gain >= 0.0 else "lost"
    gained = f"the model {did} {abs(gain):.1f} standard deviations of the noise on {constant}, beyond chance"
    if share == 0.0:
        return f"nothing certain was learnt ({gained}), so {released} published"
    if share == 1.0:
        return f"none, as {gained}"
    less = "" if gain >= 0.0 else ", less than its noise costs"
    return f"{gained}{less}, so {share:.0%} of it is kept, and the rest is {released.rpartition(' ')[0]}"


def report_text(metrics: Metrics, records: int, commonest: float) -> ReportText:
    """The page's texts. records: the number of held-out records. commonest: the largest class's share of them."""
    text = (
        _private_text(metrics) if is_private(metrics) else _kind_in(metrics).text(metrics, records, commonest)
    )
    shrunk = f" Shrinkage: {words}." if (words := _shrinkage_text(metrics)) else ""
    return replace(text, sentences=text.sentences + shrunk + _uneven_sentences(metrics))


def held_out_metrics(metrics: Metrics) -> dict[str, float | None]:
    """The metrics of the held-out records, by name without `test_`, the headline first and without the loss."""
    if is_private(metrics):
        return {
            name.removeprefix("test_"): None if estimate is None else estimate["value"]
            for name, estimate in private_estimates(metrics).items()
        }
    names = [name for name in _kind_in(metrics).metrics if name.startswith("test_") and name != "test_loss"]
    return {name.removeprefix("test_"): _number(metrics, name) for name in names}


def placeholder_metrics(kind: TargetKind, *, evaluation_epsilon: float | None = None) -> Metrics:
    """Metrics of ones, to rehearse a report; evaluation_epsilon: of private held-out records."""
    if evaluation_epsilon is not None:
        return {
            "held_out": "private",
            "evaluation_epsilon": evaluation_epsilon,
            "test_accuracy": {"value": 1.0, "low": 1.0, "high": 1.0},
            "test_log_loss": None,
        }
    return cast(PublicMetrics, dict.fromkeys(_KINDS[kind].metrics, 1.0))


def private_estimates(metrics: PrivateMetrics) -> dict[str, EstimateRow | None]:
    """The estimates of private held-out records by name, the headline first; None where noise drowns one."""
    names = sorted(
        (name for name in metrics if name.startswith("test_")), key=lambda x: x != _headline(metrics)
    )
    return {name: _estimate(metrics, name) for name in names}


def private_words(metrics: PrivateMetrics) -> str:
    """What protects the numbers of private held-out records."""
    return f"private, epsilon {metrics['evaluation_epsilon']:.4g}"


NOT_EVALUATED = (
    "the held-out records are private, and their evaluation failed after training, so there are no metrics"
)
NOISE_DROWNS_IT = "too few people are held out for this epsilon: noise drowns it"


def _private_rows(metrics: PrivateMetrics) -> TextRows:
    estimates = private_estimates(metrics)
    if not estimates:
        return [("held-out metrics", NOT_EVALUATED)]
    return (
        [("held-out metrics", f"{private_words(metrics)}; 95% intervals")]
        + [
            (
                f"test {metric_words(key)}",
                NOISE_DROWNS_IT if estimate is None else _estimate_text(estimate, key),
            )
            for key, estimate in estimates.items()
        ]
        + _private_baseline_row(metrics)
        + ([("recalibration", _recalibration_text(metrics))] if "recalibration" in metrics else [])
    )


def _private_baseline_row(metrics: PrivateMetrics) -> TextRows:
    """How a model compares with the best constant answer, or that noise drowns that; no row where none is released."""
    verdict = _private_verdict(metrics)
    if verdict is not None:
        return [("baseline", f"the model is {verdict}")]
    kind = "number" if "test_r2" in metrics else "class"
    if kind == "class" and "test_majority_accuracy" not in metrics:
        return []
    return [
        ("baseline", f"not known, as noise drowns it: whether the model is better than {_CONSTANT[kind]}")
    ]


def _private_verdict(metrics: PrivateMetrics) -> str | None:
    """How a model compares with the best constant answer, by the intervals.

    None where noise drowns them, and for scores, of which no constant answer's is released.
    """
    headline, maximum = headline_estimate(metrics), metrics.get("test_majority_accuracy")
    kind = "number" if "test_r2" in metrics else "class"
    if headline is None or (kind == "class" and maximum is None):
        return None
    constant = 0.0 if maximum is None else maximum["value"]
    return _verdict(headline[1] - constant, headline[2] - constant, kind)


def _recalibration_text(metrics: PrivateMetrics) -> str:
    recalibration = metrics["recalibration"]
    if recalibration is None:
        return "none, as it does not help beyond the noise"
    if "log_loss_gain" in recalibration:
        score, gain = "log loss", _estimate_text(recalibration["log_loss_gain"], "log_loss_gain")
    else:
        score, gain = "Brier score", _estimate_text(recalibration["brier_score_gain"], "brier_score_gain")
    return (
        f"the model's log-odds are divided by {recalibration['temperature']:.3g}; on people who did not fit this its"
        f" {score} is smaller by {gain}, while log loss and calibration are stated as before it"
    )


def _estimate_text(estimate: EstimateRow, name: str) -> str:
    return ", ".join(_cells(estimate, name))


def _private_text(metrics: PrivateMetrics) -> ReportText:
    """The page's texts about private held-out records; the numbers of records and classes are private, too."""
    estimates, name = private_estimates(metrics), metric_name(metrics)
    captions = (
        "Right answers for each class, from the released histogram; in brackets how many held-out records it says.",
        "What the model answered, from the released histogram.",
    )
    if not estimates:
        return ReportText(
            "–", NOT_EVALUATED, f"{NOT_EVALUATED[0].upper()}{NOT_EVALUATED[1:]}.", None, captions
        )
    groups = "".join(map(_groups_text, metrics.get("groups", {}).items()))
    text = (
        f"The held-out records are private. One noised histogram of them was released ({private_words(metrics)}), and"
        f" all numbers follow from it; each has its 95% interval, which counts the noise and that these people are a"
        f" sample."
    )
    rows = [(metric_words(key), *_cells(estimate, key)) for key, estimate in estimates.items()]
    text += _table(("metric", "value", "95% interval"), rows)
    if "recalibration" in metrics:
        text += f"Recalibration: {_recalibration_text(metrics)}."
    text += _thresholds_text(metrics.get("thresholds", ())) + groups
    estimate = headline_estimate(metrics)
    tile = "–" if estimate is None else format_metric(estimate[0], name, 1)
    note = f"{name} on private records it never saw ({private_words(metrics)})"
    if estimate is not None:
        note += (
            f"; 95% interval {format_metric(estimate[1], name, 1)} to {format_metric(estimate[2], name, 1)}"
        )
    verdict, warning = (
        _private_verdict(metrics),
        None if estimate else f"No {name} is known: {NOISE_DROWNS_IT}.",
    )
    if verdict is not None and not verdict.startswith("better"):
        warning = f"The model is {verdict}."
    return ReportText(tile, note, text, warning, captions)


def _thresholds_text(thresholds: Sequence[ThresholdRow]) -> str:
    """A table of every other threshold of two classes, as HTML."""
    if not thresholds:
        return ""
    columns: tuple[Literal["selected", "precision", "recall", "lift"], ...]
    columns = ("selected", "precision", "recall", "lift")
    rows = [
        (f"{row['threshold']:.3g}", *("<br>".join(_cells(row[name], name)) for name in columns))
        for row in thresholds[1::2]
    ]
    words = "</p><p>Where the second class is predicted from one probability on, with 95% intervals:"
    return words + _table(("from a probability of", *columns), rows)


def _cells(estimate: EstimateRow | None, name: str) -> tuple[str, str]:
    """An estimate and its interval, each a text that stays in one line."""
    if estimate is None:
        return "unknown", "noise drowns it"
    value, low, high = (
        format_metric(end, name) for end in (estimate["value"], estimate["low"], estimate["high"])
    )
    return value, f"{low} to {high}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML, between two paragraphs."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        "<tr>" + "".join(f'<td class="name">{cell}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'</p><div class="scroll"><table><tr>{heads}</tr>{lines}</table></div><p>'


def _groups_text(of_column: tuple[str, Sequence[GroupRow]]) -> str:
    """The headline of each group of a column, as HTML; small groups are merged, by their released sizes."""
    column, groups = of_column
    return f"</p><p>By {escape(column)}: {escape(group_metrics(groups))}."


def group_metrics(groups: Sequence[GroupRow]) -> str:
    """The headline of each group of a column, such as `f accuracy 81.0% (78.2% to 83.9%); ...`, not escaped."""
    names: tuple[Literal["accuracy", "r2", "score"], ...] = ("accuracy", "r2", "score")
    shown = []
    for group in groups:
        name = next((key for key in names if key in group), None)
        metric = None if name is None else group[name]
        text = "unknown" if metric is None or name is None else _estimate_text(metric, name)
        shown.append(f"{group['group']} {text}")
    return "; ".join(shown)


def rare_classes(metrics: Metrics) -> dict[str, ClassRow]:
    """Share, recall and precision of the rarest classes, at most three: those with less than half of an even share.

    Empty where classes are even, for other targets, and where noise drowns the shares.
    """
    by_class = {row["class"]: row for row in metrics.get("by_class", ())}
    shares = {name: row["share"]["value"] for name, row in by_class.items() if row["share"] is not None}
    rare = sorted((name for name in shares if shares[name] * len(by_class) < 0.5), key=shares.__getitem__)
    return {name: by_class[name] for name in rare[:_MAX_RARE]}


def _short(estimate: EstimateRow | None) -> str:
    """A share with its interval, in percent."""
    if estimate is None:
        return "unknown, as noise drowns it"
    return f"{percent(estimate['value'])} ({percent(estimate['low'])} to {percent(estimate['high'])})"


def _uneven_rows(metrics: Metrics) -> TextRows:
    rows = [
        (
            f"rare class {name}",
            f"recall {_short(row['recall'])}, precision {_short(row['precision'])}; naming all so:"
            f" {_short(row['share'])}",
        )
        for name, row in rare_classes(metrics).items()
    ]
    decision = metrics.get("decision")
    if decision is not None:
        rows.append(
            (
                "cheapest threshold",
                f"{decision['class']} from a probability of {decision['threshold']:.3g} on: recall"
                f" {_short(decision['recall'])}, precision {_short(decision['precision'])};"
                f" {_cost_sentence(decision)}",
            )
        )
    return rows


def _cost_sentence(decision: DecisionRow) -> str:
    """What a record costs at the cheapest threshold, and by the better constant answer."""
    cost, constant = decision["cost"], decision["constant_cost"]
    if cost is None or constant is None:
        return "noise drowns what a record costs"
    how = "better than" if cost["high"] < constant["value"] else "not clearly better than"
    return (
        f"a record costs {cost['value']:.3g} ({cost['low']:.3g} to {cost['high']:.3g}), {how} always naming one class,"
        f" {constant['value']:.3g}"
    )


def _uneven_sentences(metrics: Metrics) -> str:
    """Sentences on uneven classes, as HTML with a space before each; none where classes are even."""
    text = ""
    rare = rare_classes(metrics)
    if rare:
        text += " Classes are uneven, so accuracy alone says little."
    for name, row in rare.items():
        recall = row["recall"] and _short(row["recall"])
        precision = row["precision"] and _short(row["precision"])
        finds = f"the model finds <b>{recall}</b>" if recall else "noise drowns how many the model finds"
        right = f"{precision} are" if precision else "noise drowns how many are"
        text += (
            f" Of the records of {escape(name)} {finds} (recall); of those that it calls so {right} (precision), where"
            f" naming all records so would be right in {_short(row['share'])}."
        )
    decision = metrics.get("decision")
    if decision is not None:
        text += (
            f" At the costs of mistakes that the data card states, it is cheapest to say {escape(decision['class'])}"
            f" from a probability of <b>{decision['threshold']:.3g}</b> on (<code>epsilonflow predict --threshold"
            f" {decision['threshold']:.3g}</code>): recall {_short(decision['recall'])}, precision"
            f" {_short(decision['precision'])}; {_cost_sentence(decision)}. The threshold was chosen on these records,"
            " so it looks a little cheaper than it is."
        )
    return text


def _class_rows(metrics: PublicMetrics) -> TextRows:
    keys = {"AUC": "test_auc", "F1": "test_f1", "calibration error": "calibration_error"}
    further = {
        name: format_metric(value, name)
        for name, key in keys.items()
        if (value := _number(metrics, key)) is not None
    }
    accuracy, majority = metrics["test_accuracy"], metrics["majority_accuracy"]
    how = verdict(accuracy, majority, metrics["test_records"])
    return [
        ("test accuracy", f"{accuracy:.2%}"),
        *([(", ".join(further), ", ".join(further.values()))] if further else []),
        ("majority-class baseline", f"{majority:.2%}: the model is {how}"),
    ]


def _class_text(metrics: PublicMetrics, records: int, commonest: float) -> ReportText:
    accuracy, f1, auc = metrics["test_accuracy"], metrics.get("test_f1"), metrics.get("test_auc")
    low, high = interval(accuracy, records)
    text = (
        f"On {records:,} held-out records the model was right in <b>{percent(accuracy)}</b> of the cases"
        f" (95% confidence interval: {percent(low)} to {percent(high)}). Always naming the most"
        f" frequent class would be right in {percent(commonest)}."
    )
    if f1 is not None:
        area = (
            "The"
            if auc is None
            else f"The area under the ROC curve is {auc:.3f} (1 is perfect, 0.5 is guessing), the"
        )
        off = metrics.get("calibration_error")
        wrong = "" if off is None else f", and the model’s probabilities are {percent(off)} off on average"
        text += f" {area} F1 averaged over classes {f1:.3f}{wrong}."
    return ReportText(
        percent(accuracy),
        f"right answers on {records:,} records it never saw; always naming the most frequent class:"
        f" {percent(commonest)}",
        text,
        None if low > commonest else f"The model is {verdict(accuracy, commonest, records)}.",
        (
            "Right answers for each class; in brackets how many held-out records it has.",
            "What the model answered. Records on the diagonal were recognised.",
        ),
    )


_CONSTANT: Mapping[str, str] = {
    "class": "always naming the most frequent class",
    "number": "always naming the mean",
    "count": "always naming the mean",
    "quantile": "always naming the quantile of all records",
    "labels": "an answer that is always the same",
    "tags": "always naming the most frequent tag",
    "next token": "always naming the most frequent token",
}
"""The best answer that is the same for all records."""


def _verdict_of(metrics: PublicMetrics, kind: str, value: float) -> str:
    """How a model compares with the best constant answer.

    value: what it gains on that answer, of any unit, where the metrics have no interval of it.
    """
    if "gain" not in metrics:
        return _verdict(value, value, kind)
    return _verdict(metrics["gain"]["low"], metrics["gain"]["high"], kind)


def _verdict(low: float, high: float, kind: str) -> str:
    """How a model compares with the best constant answer, on which it gains between these numbers."""
    how = "better than" if low > 0 else "worse than" if high < 0 else "within noise of"
    if low == high == 0:
        how = "no better than"
    return f"{how} {_CONSTANT[kind]}"


def _warning_of(metrics: PublicMetrics, kind: str, value: float) -> str | None:
    words = _verdict_of(metrics, kind, value)
    return None if words.startswith("better") else f"The model is {words}."


_NUMBER_CAPTIONS = (
    "Predictions that are in the interval of the real number, by that interval; in brackets how many held-out records"
    " it has.",
    "Real against predicted numbers, by ten equal intervals. On the diagonal both are in one.",
)


def _number_rows(metrics: PublicMetrics) -> TextRows:
    return [
        ("variance explained (R2)", f"{metrics['test_r2']:.2%}"),
        ("root mean squared, mean absolute error", f"{metrics['test_rmse']:.4g}, {metrics['test_mae']:.4g}"),
        (
            "root mean squared error of the mean",
            f"{metrics['mean_rmse']:.4g}: the model is {_verdict_of(metrics, 'number', metrics['test_r2'])}",
        ),
    ]


def _number_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    r2, rmse = metrics["test_r2"], metrics["test_rmse"]
    mae, mean = metrics["test_mae"], metrics["mean_rmse"]
    return ReportText(
        percent(r2),
        f"of the variance explained (R2) on {records:,} records it never saw; always naming their mean: 0%",
        f"On {records:,} held-out records the model explains <b>{percent(r2)}</b> of the variance (R2). It is off by"
        f" {rmse:.4g} (root mean squared) and {mae:.4g} (on average); always naming the mean of these records is off by"
        f" {mean:.4g} (root mean squared).",
        _warning_of(metrics, "number", r2),
        _NUMBER_CAPTIONS,
    )


def _count_rows(metrics: PublicMetrics) -> TextRows:
    return [
        ("deviance explained (D2)", f"{metrics['test_d2']:.2%}"),
        ("mean Poisson deviance", f"{metrics['test_deviance']:.4g}"),
        ("root mean squared, mean absolute error", f"{metrics['test_rmse']:.4g}, {metrics['test_mae']:.4g}"),
        (
            "mean Poisson deviance of the mean",
            f"{metrics['mean_deviance']:.4g}: the model is {_verdict_of(metrics, 'count', metrics['test_d2'])}",
        ),
    ]


def _count_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    d2, deviance, alone = metrics["test_d2"], metrics["test_deviance"], metrics["mean_deviance"]
    return ReportText(
        percent(d2),
        f"of the Poisson deviance explained (D2) on {records:,} records it never saw; always naming their mean:"
        " 0%",
        f"On {records:,} held-out records the model explains <b>{percent(d2)}</b> of the Poisson deviance (D2): its"
        f" mean is {deviance:.4g}, and {alone:.4g} for always naming the mean of these records. The predicted mean of a"
        f" count is off by {metrics['test_rmse']:.4g} (root mean squared), that of all records by"
        f" {metrics['mean_rmse']:.4g}.",
        _warning_of(metrics, "count", d2),
        _NUMBER_CAPTIONS,
    )


def _quantile_rows(metrics: PublicMetrics) -> TextRows:
    explained = metrics["test_pinball_explained"]
    return [
        ("pinball loss explained (R1)", f"{explained:.2%}"),
        ("mean pinball loss", f"{metrics['test_pinball_loss']:.4g}"),
        ("records at or below their quantile", f"{metrics['test_coverage']:.2%} of {metrics['level']:.2%}"),
        (
            "mean pinball loss of the quantile of all records",
            f"{metrics['constant_pinball_loss']:.4g}: the model is {_verdict_of(metrics, 'quantile', explained)}",
        ),
    ]


def _quantile_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    explained, loss = metrics["test_pinball_explained"], metrics["test_pinball_loss"]
    return ReportText(
        percent(explained),
        f"of the pinball loss explained (R1) on {records:,} records it never saw; always naming their quantile: 0%",
        f"On {records:,} held-out records the model explains <b>{percent(explained)}</b> of the pinball loss (R1): its"
        f" mean is {loss:.4g}, and {metrics['constant_pinball_loss']:.4g} for always naming the quantile of these"
        f" records. {percent(metrics['test_coverage'])} of the records are at or below their predicted quantile, where"
        f" {percent(metrics['level'])} should be.",
        _warning_of(metrics, "quantile", explained),
        _NUMBER_CAPTIONS,
    )


def _label_rows(metrics: PublicMetrics) -> TextRows:
    micro, macro = metrics["test_micro_f1"], metrics["test_macro_f1"]
    return [
        ("F1 over all labels, averaged over labels", f"{micro:.3f}, {macro:.3f}"),
        ("AUC averaged over labels", _decimals(metrics["test_auc"])),
        ("subset accuracy: all labels right", f"{metrics['test_subset_accuracy']:.2%}"),
        (
            "best constant answer",
            f"F1 {metrics['constant_micro_f1']:.3f}, all labels right {metrics['constant_subset_accuracy']:.2%}: the"
            f" model is {_verdict_of(metrics, 'labels', micro - metrics['constant_micro_f1'])}",
        ),
    ]


def _label_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    micro, macro, auc = metrics["test_micro_f1"], metrics["test_macro_f1"], metrics["test_auc"]
    subset, always = metrics["test_subset_accuracy"], metrics["constant_subset_accuracy"]
    constant = metrics["constant_micro_f1"]
    area = "" if auc is None else f" The area under the ROC curve, averaged over labels, is {auc:.3f}."
    return ReportText(
        f"{micro:.3f}",
        "F1 over all labels of records it never saw (1 is perfect); the best answer that is always the same:"
        f" {constant:.3f}",
        f"F1 over all labels is <b>{micro:.3f}</b>, averaged over labels {macro:.3f}; the best answer that is the same"
        f" for every record has {constant:.3f}. All labels of a record are right in {percent(subset)} of the cases,"
        f" against {percent(always)} for always naming the most frequent set of labels.{area}",
        _warning_of(metrics, "labels", micro - constant),
        (
            "Of the held-out records that have a label, the share in which it was found; in brackets how many have it.",
            "The labels that a record has against those that the model gave it; a record counts once for each pair.",
        ),
    )


def _token_rows(metrics: PublicMetrics) -> TextRows:
    return [
        ("perplexity", f"{metrics['test_perplexity']:.4g}"),
        (
            "loss per token, next-token accuracy",
            f"{metrics['test_loss']:.4f}, {metrics['test_token_accuracy']:.2%}",
        ),
        (
            "perplexity of token frequencies alone",
            f"{metrics['unigram_perplexity']:.4g}"
            + (
                f"; in naming the next token the model is {_verdict_of(metrics, 'next token', 0.0)}"
                if "gain" in metrics
                else ""
            ),
        ),
    ]


def _token_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    accuracy, perplexity = metrics["test_token_accuracy"], metrics["test_perplexity"]
    loss, alone = metrics["test_loss"], metrics["unigram_perplexity"]
    return ReportText(
        f"{perplexity:.4g}",
        "perplexity on texts it never saw: it is as unsure as among so many tokens; smaller is better. Their"
        f" frequencies alone: {alone:.4g}",
        f"On the held-out texts the loss is {loss:.4f} per token, a perplexity of <b>{perplexity:.4g}</b>; the"
        f" frequencies of these tokens alone give {alone:.4g}. The next token was ranked first in"
        f" {percent(accuracy)} of the cases.",
        None if perplexity < alone else "The model is no better than the frequencies of the tokens.",
        (
            "Next tokens that are in the interval of the real one, by ten intervals of the vocabulary; in brackets how"
            " many held-out tokens each has.",
            "Real against predicted next tokens, by ten intervals of the vocabulary.",
        ),
    )


def _tag_rows(metrics: PublicMetrics) -> TextRows:
    entities = metrics.get("test_entity_f1")
    return [
        *([] if entities is None else [("F1 over entities", f"{entities:.3f}")]),
        ("F1 over all tags except outside", f"{metrics['test_token_f1']:.3f}"),
        ("tag accuracy", f"{metrics['test_token_accuracy']:.2%}"),
        (
            "majority-tag baseline",
            f"{metrics['majority_accuracy']:.2%}: the model is"
            f" {_verdict_of(metrics, 'tags', metrics['test_token_accuracy'] - metrics['majority_accuracy'])}",
        ),
    ]


def _tag_text(metrics: PublicMetrics, records: int, _: float) -> ReportText:
    f1, accuracy, majority = (
        metrics["test_token_f1"],
        metrics["test_token_accuracy"],
        metrics["majority_accuracy"],
    )
    entities = metrics.get("test_entity_f1")
    words = f"F1 over all tags except outside is <b>{f1:.3f}</b>."
    if entities is not None:
        words = (
            f"F1 over entities is <b>{entities:.3f}</b>: one is right where its first word, its last and its type are."
            f" F1 over the tags of single words except outside is {f1:.3f}."
        )
    return ReportText(
        f"{f1 if entities is None else entities:.3f}",
        f"F1 over {'the tags of words' if entities is None else 'entities in texts'} it never saw, those outside left"
        f" out; right tags: {percent(accuracy)}",
        f"{words} {percent(accuracy)} of the held-out words have the right"
        f" tag; always naming the most frequent one would be right in {percent(majority)}.",
        _warning_of(metrics, "tags", accuracy - majority),
        (
            "Right tags for each tag; in brackets how many held-out words have it.",
            "What the model answered. Words on the diagonal were recognised.",
        ),
    )


@dataclass(frozen=True)
class _MetricKind:
    """metrics: their names; models are compared by the first, the headline."""

    metrics: tuple[str, ...]
    rows: Callable[[PublicMetrics], TextRows]
    text: Callable[[PublicMetrics, int, float], ReportText]

    @property
    def headline(self) -> str:
        return self.metrics[0]


_TAGS = ("test_token_f1", "test_token_accuracy", "majority_accuracy")
_KINDS: Mapping[TargetKind | Literal["entities"], _MetricKind] = {
    "class": _MetricKind(("test_accuracy",), _class_rows, _class_text),
    "number": _MetricKind(("test_r2", "test_rmse", "test_mae", "mean_rmse"), _number_rows, _number_text),
    "count": _MetricKind(
        ("test_d2", "test_deviance", "mean_deviance", "test_rmse", "test_mae", "mean_rmse"),
        _count_rows,
        _count_text,
    ),
    "quantile": _MetricKind(
        (
            "test_pinball_explained",
            "test_pinball_loss",
            "constant_pinball_loss",
            "test_coverage",
            "level",
        ),
        _quantile_rows,
        _quantile_text,
    ),
    "labels": _MetricKind(
        (
            "test_micro_f1",
            "test_macro_f1",
            "test_subset_accuracy",
            "test_auc",
            "constant_micro_f1",
            "constant_subset_accuracy",
        ),
        _label_rows,
        _label_text,
    ),
    "entities": _MetricKind(("test_entity_f1", *_TAGS), _tag_rows, _tag_text),
    "tags": _MetricKind(_TAGS, _tag_rows, _tag_text),
    "next token": _MetricKind(
        ("test_token_accuracy", "test_perplexity", "test_loss", "unigram_perplexity"),
        _token_rows,
        _token_text,
    ),
}


HELD_OUT_METRICS = tuple(
    dict.fromkeys(
        name.removeprefix("test_")
        for kind in _KINDS.values()
        for name in kind.metrics
        if name.startswith("test_") and name != "test_loss"
    )
)
"""All names that `held_out_metrics` may return."""


_PRIVATE_HEADLINES = ("test_accuracy", "test_r2", "test_score")


def _headline(metrics: Metrics) -> str:
    if is_private(metrics):
        return next((name for name in _PRIVATE_HEADLINES if name in metrics), _PRIVATE_HEADLINES[0])
    return _kind_in(metrics).headline


def _kind_in(metrics: Metrics) -> _MetricKind:
    return next(kind for kind in _KINDS.values() if kind.headline in metrics)


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, as text."""
    return f"{share:.{digits}%}"


def _decimals(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
