"""The report of a run as one self-contained HTML page: plain text first, details for experts collapsed.

Also what it shares with other pages, such as that of a comparison: pictures, style, environment.

The history of a run on blocks is the state of the population's blocks according to the ledger, and earlier periods of
the retraining. Everything is shown as of the run's settlement, so that a later report says the same. Nothing here is
about private records, except numbers that were released and paid for; held-out records are public.
"""

import base64
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field

from algorithms.plain_text import for_markdown, visible
from algorithms.privacy.accounting import rounded_up
from algorithms.privacy.accounting.risk import Profile, advantage, gaussian_mu, max_true_positive_rate
from algorithms.privacy.card import CardVerification, PrivacyCard, text
from algorithms.privacy.card.schema import words_by
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import WHOLE_POPULATION
from data.files import read_json
from tasks.reporting.column_summaries import ColumnSummary
from tasks.reporting.figures import (
    THIS_RUN,
    Drawing,
    Picture,
    blocks_figure,
    quality_figure,
    retrainings_figure,
    shape_figure,
)
from tasks.reporting.shapes import Explanation, Shape
from tasks.retraining import Registry, RetrainingState, RetrainingStates
from tasks.runs.metrics import (
    ACCURACY,
    ReportText,
    format_metric,
    headline_metric,
    metric_name,
    percent,
    report_text,
)
from tasks.runs.metrics_document import Metrics

if TYPE_CHECKING:  # imported where a ledger is read: it imports SQLAlchemy
    from algorithms.privacy.ledger import Ledger, Settlement

_SHARED = Path(__file__).parent
_PEOPLE = ("gaussian", "gumbel", "laplace", "poisson")
"""Kinds of noise and sampling that are named after a person."""
FALSE_ALARMS = (0.001, 0.01, 0.05)
_STRONG_EPSILON, _REASONABLE_EPSILON = 1.0, 10.0
_MAX_EVENTS = 40
AUDIT, AUDIT_PAGE = "audit.json", "audit.html"
BLOCKS = ("block", "spent_epsilon", "spent_delta", "cap_epsilon", "cap_delta", "retired")
RETRAININGS = ("period", "outcome", "run_id", "epsilon", "quality", "blocks")
_MAX_ROWS = 12
_DIFFERS = 1.02
"""Quality is drawn against epsilon if the largest epsilon is more than this many times the smallest."""
_END_PHRASES = {
    "promoted": "its model served",
    "kept": "its model did not serve",
    "forfeited": "given up; all of it counts as spent",
    "given up": "given up",
    "open": "not finished",
    THIS_RUN: THIS_RUN,
}


_DIGITS = 6
"""Significant digits of what a run is allowed."""


def environment(*, below: Path = _SHARED, markdown: bool = False) -> Environment:
    """An environment with the templates of `below` and of this folder, and with their filters.

    markdown: whether pages are Markdown, not HTML. Either way a text is never markup, unless it is marked `safe`.
    """

    def finalize(value: object) -> object:
        if not isinstance(value, str) or isinstance(value, Markup):
            return value
        return Markup(for_markdown(value)) if markdown else visible(value)

    templates = Environment(
        loader=FileSystemLoader([below, _SHARED]),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "source": lambda png: "data:image/png;base64," + base64.b64encode(png).decode(),
        "up": _up,
        "spent": _spent_amount,
        "allowed": lambda number: "none" if number is None else rounded_up(number, _DIGITS),
        "down": _down,
        "percent": percent,
        "at_most": lambda share: f"{math.ceil(1000 * share - 1e-9) / 10:.1f}%",
        "number": _number,
        "plain": lambda number: f"{Decimal(repr(number)):f}",  # without an exponent
        "text": _text,
        "named": lambda kind: kind.capitalize() if kind in _PEOPLE else kind,
    }
    return templates


def audit_folder(method: str) -> Path:
    """The folder of a method's newest audit, relative to the checkout."""
    return Path("audits", re.sub(r"\W+", "_", method))


class AuditSummary(BaseModel):
    """What other documents say of an audit; audit.json has more.

    Attributes:
        method: That was audited.
        at: The time, by ISO 8601.
        claimed: Epsilon that the method claims.
        epsilon_lower_bound: Epsilon that the attacks found at least; `found` in files.
        is_violated: Whether that, or a check of a mechanism, refutes the claim.
    """

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    method: str
    at: str
    claimed: float
    epsilon_lower_bound: float = Field(alias="found")
    is_violated: bool

    @property
    def page(self) -> str:
        """The path of the audit's page, relative to `artifacts`."""
        return str(Path("..") / audit_folder(self.method) / AUDIT_PAGE)


def newest_audit(method: str, root: Path) -> AuditSummary | None:
    """The newest audit of a method in a checkout, if there is one that can be read."""
    try:
        return AuditSummary.model_validate(read_json(root / audit_folder(method) / AUDIT))
    except (OSError, ValueError):
        return None


def risk_of(profile: Profile) -> dict[str, object]:
    """The template's variables on what the best attacker can achieve who tells whether a record was used.

    attacks: what is caught at selected false alarm rates. guess: how often the attacker is right if half of the records
    in question were used. mu: of the smallest Gaussian mechanism that reveals at least as much. Rates are from 0 to 1;
    see `algorithms.privacy.accounting.risk`.
    """
    share = advantage(profile)
    attacks = [
        {"false_alarms": rate, "caught": float(max_true_positive_rate(profile, rate))}
        for rate in FALSE_ALARMS
    ]
    return {"attacks": attacks, "advantage": share, "guess": 0.5 + share / 2, "mu": gaussian_mu(profile)}


def score(metrics: Metrics, classes: pd.DataFrame) -> ReportText:
    """The page's sentences about the model. classes: columns `class`, `accuracy`, `records`."""
    records = int(classes["records"].sum())
    return report_text(metrics, records, float(classes["records"].max()) / max(1, records))


def strength(epsilon: float) -> str:
    """How epsilon is usually judged (Ponomareva et al. 2023, "How to DP-fy ML", section 5.2)."""
    if epsilon <= _STRONG_EPSILON:
        return "strong"
    return "reasonable" if epsilon <= _REASONABLE_EPSILON else "weak"


@dataclass(frozen=True)
class BesideTheCard:
    """What the page says of a run that its card does not.

    risk: None for a run that promises nothing. attack: the attack to which the noise was calibrated, if any.
    ten_more: the epsilon that will be spent after ten more runs like this, if the ledger said it.
    audit: the newest audit of the method, if any. other_software: which software trained, if it was not this one.
    explanation: what the model says of each column, if it is additive. columns: what released histograms say of each.
    """

    risk: Mapping[str, object] | None
    attack: Mapping[str, float] | None = None
    ten_more: float | None = None
    audit: AuditSummary | None = None
    other_software: str | None = None
    explanation: Explanation | None = None
    columns: tuple[ColumnSummary, ...] = ()


def page(
    card: PrivacyCard,
    verification: CardVerification,
    result: ReportText,
    pictures: Mapping[str, Picture],
    past: Mapping[str, object],
    beside: BesideTheCard,
) -> str:
    """Make the page.

    pictures: epsilon, risk, noise, those of the history, and confusion and per_class where there are classes. past:
    template variables of the history.
    """
    explanation = beside.explanation
    epsilon, delta = card.setting.epsilon, card.setting.delta
    cap, spent = card.accounting.population.cap.epsilon, card.accounting.population.spent.epsilon
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            card=card,
            verification=verification,
            score=result,
            pictures=pictures,
            **past,
            risk=beside.risk,
            attack=beside.attack,
            ten_more=beside.ten_more,
            audit=beside.audit,
            other_software=beside.other_software,
            explanation=explanation,
            shape_rows=[] if explanation is None else [_shape_row(shape) for shape in explanation.shapes],
            columns=beside.columns,
            factor=None if epsilon is None else rounded_up(math.exp(min(epsilon, 700.0)), 3),
            strength=None if epsilon is None else strength(epsilon),
            one_in=f"{1 / delta:,.0f}" if delta else None,
            spent_share=100.0 if not cap or spent is None else min(100.0, 100 * spent / cap),
            said=text,
            accountants=words_by(card.accounting.epsilon.model_dump()),
            start=None if card.mechanism.model.start is None else text.STARTED,
            events=[(json.dumps(row.event, indent=1), row.count) for row in card.events[:_MAX_EVENTS]],
            so_far=None if card.accounting.composition.kind == "schedule" else text.SO_FAR,
            more_events=max(0, len(card.events) - _MAX_EVENTS),
        )
    )


def shape_drawings(explanation: Explanation | None) -> dict[str, tuple[Drawing, str]]:
    """The figures of shape functions by name, each with its alternative text."""
    if explanation is None:
        return {}

    def draw(shape: Shape) -> Drawing:
        return lambda theme: shape_figure(shape, explanation.outputs, unit=explanation.unit, theme=theme)

    return {
        f"shape {index}": (draw(shape), f"What {shape.name} adds to the {explanation.unit}, by its value.")
        for index, shape in enumerate(explanation.drawn_shapes)
    }


def _shape_row(shape: Shape) -> dict[str, object]:
    effect = shape.effects[:, shape.output]
    return {
        "name": shape.name,
        "lowest": shape.values[int(effect.argmin())],
        "highest": shape.values[int(effect.argmax())],
        "span": f"{shape.span:.3g}",
        "is_noise": shape.is_noise,
        "missing": f"{shape.missing[shape.output]:+.3g}",
        "deviation": "unknown" if shape.deviation is None else f"{shape.deviation:.2g}",
    }


def _up(number: float | None, digits: int = 4) -> str:
    return "infinite" if number is None else rounded_up(number, digits)


def _spent_amount(number: float | None, allowed: float | None, digits: int = 4) -> str:
    """What was spent, rounded up, with as many more digits as keep it from looking like more than what was allowed."""
    if number is None or allowed is None:
        return _up(number, digits)
    limit = float(rounded_up(allowed, _DIGITS))
    shown = (rounded_up(number, more) for more in range(digits, _DIGITS))
    return next((text for text in shown if float(text) <= limit), rounded_up(number, _DIGITS))


def _down(number: float | None) -> str:
    """The remaining budget, rounded down to four decimals and at most seven digits, which fit a narrow tile.

    Example:
        >>> _down(999_994.00076), _down(8.00034)
        ('999,994', '8.0003')
    """
    if number is None:
        return "infinite"
    short = Context(prec=7, rounding=ROUND_FLOOR).create_decimal(repr(number))
    return f"{short.quantize(Decimal('0.0001'), ROUND_FLOOR).normalize():,f}"


def _number(number: float | None) -> str:
    """A number in six significant digits, without an exponent."""
    return "none" if number is None else f"{Context(prec=6).create_decimal(repr(number)).normalize():,f}"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class History:
    """The history of a run.

    blocks: the population's blocks in order, with the columns BLOCKS. retrainings: from the oldest to this run, with
    the columns RETRAININGS: epsilon is what a run is charged; quality is on held-out records, NaN if there is no model;
    blocks are a text. Both tables may be empty. metric: the name of the quality metric. changes: how the recipe of this
    retraining differs from that of the model that served, as was accepted.
    """

    blocks: pd.DataFrame
    retrainings: pd.DataFrame
    metric: str = ACCURACY
    changes: str = ""


def nothing() -> History:
    """The history of a run on a whole population."""
    return History(_frame([], BLOCKS), _frame([], RETRAININGS))


def is_on_blocks(receipt: Receipt) -> bool:
    """Whether a run was charged to blocks; other runs have no history and do not need the ledger."""
    return receipt.blocks not in ((), (WHOLE_POPULATION,))


def history(receipt: Receipt, metrics: Metrics, *, ledger: "Ledger", home: Path, root: Path) -> History:
    """The history of a finished run on blocks.

    receipt, metrics: of the run. home: folder of the states of retrainings. root: the checkout, with its models. If the
    ledger does not know the run, the history has only the blocks that the receipt names.
    """
    from algorithms.privacy.ledger import settlement

    if ledger.status(receipt.run_id) != "settled":
        return History(_blocks_of_receipt(receipt), nothing().retrainings)
    past = settlement(ledger, receipt.population, receipt.run_id)
    rows = [
        (b.block, b.spent.epsilon, b.spent.delta, b.cap.epsilon, b.cap.delta, b.retired) for b in past.blocks
    ]
    name, _, period = (past.run.retraining or "").rpartition(" ")
    state = RetrainingStates(home / "retrainings" / name).of(period) if name else None
    return History(
        _frame(rows, BLOCKS),
        _retrainings(receipt, metrics, past, home, root),
        metric_name(metrics),
        "" if state is None else state.changes,
    )


def _blocks_of_receipt(receipt: Receipt) -> pd.DataFrame:
    rows = [
        (row.name, row.spent.epsilon, row.spent.delta, row.cap.epsilon, row.cap.delta, False)
        for row in receipt.ledger.blocks
    ]
    return _frame(rows, BLOCKS)


def _retrainings(
    receipt: Receipt, metrics: Metrics, past: "Settlement", home: Path, root: Path
) -> pd.DataFrame:
    if past.run.retraining is None:
        return nothing().retrainings
    name, _, period = past.run.retraining.rpartition(" ")
    registry = Registry(root / "models" / name)
    # In the order in which they began, since names of periods of several lengths do not sort by time.
    earlier = itertools.takewhile(
        lambda state: state.period != period, RetrainingStates(home / "retrainings" / name).all()
    )
    rows = [_row(state, past, registry) for state in earlier]
    this = (receipt.run_id, metrics["epsilon"], headline_metric(metrics), _words(receipt.blocks))
    return _frame([*rows, (period, THIS_RUN, *this)], RETRAININGS)


def _row(state: RetrainingState, past: "Settlement", registry: Registry) -> tuple[Any, ...]:
    """An earlier period. Without a model, epsilon is what the ledger charged for the run; without a run, it is 0."""
    metrics = registry.metrics(state.run_id) if state.run_id else {}
    run = past.state.runs.get(state.run_id or "")
    epsilon = metrics.get("epsilon", run.charged.epsilon if run else 0.0)
    value = headline_metric(metrics) if metrics else None
    return state.period, state.kind, state.run_id, epsilon, value, _words(state.blocks)


def _words(blocks: Sequence[str]) -> str:
    """Blocks in a table cell: up to three are listed, more are shown as the first, the last and their number."""
    return ", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"


def _frame(rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """Make a table; a missing or infinite number becomes NaN."""
    table = pd.DataFrame(rows, columns=list(columns))
    numbers = [name for name in columns if name.endswith(("epsilon", "delta", "quality"))]
    return table.assign(**{name: pd.to_numeric(table[name]).replace(math.inf, math.nan) for name in numbers})


def drawings(history: History) -> dict[str, tuple[Drawing, str]]:
    """The figures that have data, by name, each with its alternative text."""
    blocks, retrainings, of = history.blocks, history.retrainings, history.metric
    figures: dict[str, tuple[Drawing, str]] = {}
    if not blocks.empty:
        figures["blocks"] = lambda theme: blocks_figure(blocks, theme=theme), _blocks_in_words(blocks)
    models = retrainings.dropna(subset=["quality"])
    if len(models) > 1:
        first, last = (format_metric(models["quality"].iloc[index], of, 1) for index in (0, -1))
        words = (
            f"Held-out {of} of {len(models)} models over {len(retrainings)} periods, from {first} to {last}, and"
            " epsilon of each run below."
        )
        figures["retrainings"] = lambda theme: retrainings_figure(retrainings, metric=of, theme=theme), words
    private = models.dropna(subset=["epsilon"])
    low, high = private["epsilon"].min(), private["epsilon"].max()
    if high > _DIFFERS * low:
        words = f"Held-out {of} of {len(private)} models whose epsilon is between {low:.3g} and {high:.3g}."
        figures["quality"] = lambda theme: quality_figure(private, metric=of, theme=theme), words
    return figures


def _blocks_in_words(blocks: pd.DataFrame) -> str:
    spent, cap = blocks["spent_epsilon"], blocks["cap_epsilon"]
    over = "" if (spent <= cap).all() else " Some are above a cap that was lowered later."
    return (
        f"Epsilon spent on each of {len(blocks)} blocks, from {spent.min():.3g} to {spent.max():.3g}, against caps of"
        f" at most {cap.max():,.10g}; {int(blocks['retired'].sum())} are retired.{over}"
    )


def history_variables(history: History, *, read: int) -> dict[str, object]:
    """The variables of the template. read: the number of blocks that this run read."""
    blocks, retrainings = history.blocks, history.retrainings
    served = retrainings.loc[retrainings["outcome"] == "promoted", "period"]
    serving = None if served.empty else str(served.iloc[-1])
    last = retrainings.iloc[::-1].head(_MAX_ROWS)
    return {
        "history": history,
        "read": read,
        "retired": int(blocks["retired"].sum()),
        "most_spent": 0.0 if blocks.empty else float(blocks["spent_epsilon"].max()),
        "serving": serving,
        "retrainings": [_table_row(row, serving, history.metric) for row in last.to_dict("records")],
        "earlier": len(retrainings) - len(last),
    }


def _table_row(row: Mapping[Any, Any], serving: str | None, of: str) -> dict[str, str]:
    is_serving = row["period"] == serving
    return {
        "period": row["period"],
        "became": "its model serves" if is_serving else _END_PHRASES[row["outcome"]],
        "epsilon": "no bound" if math.isnan(row["epsilon"]) else rounded_up(row["epsilon"]),
        "quality": "no model" if math.isnan(row["quality"]) else format_metric(row["quality"], of, 1),
        "blocks": row["blocks"],
    }
