"""The report as one self-contained HTML page: plain text first, details for experts collapsed.

Also contains what it shares with other pages, such as that of a comparison: pictures, style, environment.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from algorithms.privacy.accounting.risk import Profile, advantage, caught, gaussian_mu
from algorithms.privacy.card import PrivacyCard, Verification, text
from algorithms.privacy.card.schema import BY
from algorithms.privacy.card.text import rounded_up
from data.files import read_json
from tasks.reporting.figures import Picture
from tasks.runs.quality import Said, percent, said

_SHARED = Path(__file__).parent


_PEOPLE = ("gaussian", "gumbel", "laplace", "poisson")
"""Kinds of noise and sampling that are named after a person."""


def environment(*, below: Path = _SHARED, autoescape: bool = True) -> Environment:
    """An environment with the templates of `below` and of this folder, and with their filters."""
    made = Environment(
        loader=FileSystemLoader([below, _SHARED]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "source": lambda png: "data:image/png;base64," + base64.b64encode(png).decode(),
        "up": _up,
        "down": _down,
        "percent": percent,
        "at_most": lambda share: f"{math.ceil(1000 * share - 1e-9) / 10:.1f} %",
        "number": _number,
        "plain": lambda number: f"{Decimal(repr(number)):f}",  # without an exponent
        "text": _text,
        "named": lambda kind: kind.capitalize() if kind in _PEOPLE else kind,
    }
    return made


FALSE_ALARMS = (0.001, 0.01, 0.05)
_STRONG, _REASONABLE = 1.0, 10.0
_MOST_EVENTS = 40
AUDIT, AUDIT_PAGE = "audit.json", "audit.html"


def audit_folder(method: str) -> Path:
    """The folder of a method's newest audit, relative to the checkout."""
    return Path("audits", re.sub(r"\W+", "_", method))


def newest_audit(method: str, root: Path) -> dict[str, Any] | None:
    """The newest audit of a method in a checkout, if any, with the path of its page relative to `artifacts`."""
    folder = audit_folder(method)
    try:
        document = read_json(root / folder / AUDIT)
    except (OSError, ValueError):
        return None
    return document | {"page": str(Path("..") / folder / AUDIT_PAGE)}


@dataclass(frozen=True)
class Attack:
    """What the best attacker achieves who tells whether a record was used. Rates are from 0 to 1."""

    false_alarms: float
    caught: float


@dataclass(frozen=True)
class Risk:
    """What the best attacker can achieve.

    attacks: at selected false alarm rates. advantage: in [0, 1]. guess: how often the attacker is right if half of the
    records in question were used. mu: of the smallest Gaussian mechanism that reveals at least as much.
    """

    attacks: tuple[Attack, ...]
    advantage: float
    guess: float
    mu: float


def risk_of(found: Profile) -> Risk:
    """The risk that follows from a run's privacy profile; see `algorithms.privacy.accounting.risk`."""
    share = advantage(found)
    attacks = tuple(Attack(rate, float(caught(found, rate))) for rate in FALSE_ALARMS)
    return Risk(attacks, share, 0.5 + share / 2, gaussian_mu(found))


def score(metrics: Mapping[str, Any], classes: pd.DataFrame) -> Said:
    """The page's sentences about the model. classes: columns `class`, `accuracy`, `records`."""
    records = int(classes["records"].sum())
    return said(metrics, records, float(classes["records"].max()) / max(1, records))


def strength(epsilon: float) -> str:
    """How epsilon is usually judged (Ponomareva et al. 2023, "How to DP-fy ML", section 5.2)."""
    if epsilon <= _STRONG:
        return "strong"
    return "reasonable" if epsilon <= _REASONABLE else "weak"


def page(
    card: PrivacyCard,
    verification: Verification,
    result: Said,
    pictures: Mapping[str, Picture],
    past: Mapping[str, object],
    *,
    risk: Risk | None,
    attack: Mapping[str, float] | None = None,
    audit: Mapping[str, Any] | None = None,
) -> str:
    """Make the page.

    pictures: epsilon, risk, noise, confusion and per_class, and those of the history. past: template variables of the
    history. risk: None for a run that promises nothing. attack: the attack to which the noise was calibrated, if any.
    audit: the newest audit of the method, if any.
    """
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
            risk=risk,
            attack=attack,
            audit=audit,
            factor=None if epsilon is None else rounded_up(math.exp(min(epsilon, 700.0)), 3),
            strength=None if epsilon is None else strength(epsilon),
            one_in=f"{1 / delta:,.0f}" if delta else None,
            spent_share=100.0 if not cap or spent is None else min(100.0, 100 * spent / cap),
            said=text,
            accountants=BY,
            start=None if card.mechanism.model.start is None else text.STARTED,
            events=[(json.dumps(row.event, indent=1), row.count) for row in card.events[:_MOST_EVENTS]],
            so_far=None if card.accounting.composition.kind == "schedule" else text.SO_FAR,
            more_events=max(0, len(card.events) - _MOST_EVENTS),
        )
    )


def _up(number: float | None, digits: int = 4) -> str:
    return "infinite" if number is None else rounded_up(number, digits)


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
