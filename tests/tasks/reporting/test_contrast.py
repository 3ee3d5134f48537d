"""Contrast in figures: lines, bars and marks at least 3:1, numbers at least 4.5:1 (WCAG 2.2, 1.4.11 and 1.4.3)."""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from tasks.comparing.report import _COLOURS
from tasks.reporting.figures import LIGHT, blocks_figure, confusion_figure
from tests.support.checkout import PROJECT

MARKS, TEXT = 3.0, 4.5
STYLE = (PROJECT / "tasks/reporting/style.css.j2").read_text()
INVERTED = "img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }"
TURN = np.array([[-0.574, 1.430, 0.144], [0.426, 0.430, 0.144], [0.426, 1.430, -0.856]])
"""hue-rotate(180deg) on red, green and blue, by the Filter Effects Module, 10.4."""

Page = Callable[[np.ndarray], np.ndarray]
"""What a page shows of a colour of a figure."""


def on_light(colour: np.ndarray) -> np.ndarray:
    return colour


def on_dark(colour: np.ndarray) -> np.ndarray:
    """Inverted, with its hue turned back, and screened with the ground of the page."""
    (ground,) = re.findall(r"prefers-color-scheme: dark\) \{ :root \{[^}]* --ground: (#\w+);", STYLE)
    inverted = np.clip(TURN @ (1 - colour), 0.0, 1.0)
    return 1 - (1 - inverted) * (1 - np.array(to_rgba(ground)[:3]))


def contrast(colour: object, ground: object, page: Page = on_light) -> float:
    """WCAG's ratio of two colours of a figure; a colour that lets the ground through is mixed with it."""
    *front, alpha = to_rgba(colour)  # type: ignore[arg-type]
    behind = np.array(to_rgba(ground)[:3])  # type: ignore[arg-type]
    light = [_luminance(page(alpha * np.array(front) + (1 - alpha) * behind)), _luminance(page(behind))]
    return (max(light) + 0.05) / (min(light) + 0.05)


def _luminance(colour: np.ndarray) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize(
    ("colour", "ground", "ratio"),
    [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.48), ("#767676", "#ffffff", 4.54)],
)
def test_the_ratio_is_that_of_wcag(colour: str, ground: str, ratio: float) -> None:
    assert contrast(colour, ground) == pytest.approx(ratio, abs=0.005)


def test_a_dark_page_inverts_figures_and_shows_their_ground_as_its_own() -> None:
    assert f"@media (prefers-color-scheme: dark) {{ {INVERTED} }}" in STYLE
    (ground,) = re.findall(r"prefers-color-scheme: dark\) \{ :root \{[^}]* --ground: (#\w+);", STYLE)
    shown = on_dark(np.array(to_rgba(LIGHT.ground)[:3]))
    assert shown == pytest.approx(np.array(to_rgba(ground)[:3]))


@pytest.mark.parametrize("page", [on_light, on_dark])
def test_each_colour_of_a_figure_stands_out_from_its_ground(page: Page) -> None:
    lines = [LIGHT.accent, LIGHT.second, LIGHT.muted, LIGHT.ink, *_COLOURS]
    assert [colour for colour in lines if contrast(colour, LIGHT.ground, page) < MARKS] == []


@pytest.mark.parametrize("page", [on_light, on_dark])
def test_each_bar_of_a_block_stands_out_from_its_ground(page: Page) -> None:
    blocks = pd.DataFrame(
        {
            "block": ["w1", "w2"],
            "spent_epsilon": [1.0, 2.0],
            "cap_epsilon": [3.0, 3.0],
            "retired": [True, False],
        }
    )
    bars = blocks_figure(blocks, theme=LIGHT).axes[0].patches
    assert len(bars) == 2
    assert min(contrast(bar.get_facecolor(), LIGHT.ground, page) for bar in bars) >= MARKS


@pytest.mark.parametrize("page", [on_light, on_dark])
def test_each_number_of_a_confusion_is_readable_on_its_cell(page: Page) -> None:
    """Cells from a hundredth to all of a class."""
    shares = (1, 25, 45, 55, 75, 90, 100)
    names = [f"class {share}" for share in shares]
    rows = [
        (name, names[(index + (record >= share)) % len(names)])
        for index, (name, share) in enumerate(zip(names, shares, strict=True))
        for record in range(100)
    ]
    pairs = pd.DataFrame(rows, columns=["actual", "predicted"])
    axes = confusion_figure(pairs, names, theme=LIGHT).axes[0]
    (image,) = axes.images
    cells = np.asarray(image.get_array())
    ratios = []
    for text in axes.texts:
        column, row = text.get_position()
        cell = image.cmap(image.norm(cells[int(row), int(column)]))
        ratios.append(contrast(text.get_color(), cell, page))
    assert len(ratios) == 2 * len(shares) - 1
    assert min(ratios) >= TEXT


def test_links_and_header_of_the_site_are_readable_on_white() -> None:
    """Not by the theme's own teal, which is 3.75:1."""
    chosen = dict(
        re.findall(r"--md-(primary-fg|typeset-a)-color: (#\w+)", (PROJECT / "docs/extra.css").read_text())
    )
    assert chosen.keys() == {"primary-fg", "typeset-a"}
    assert min(contrast(colour, "#ffffff") for colour in chosen.values()) >= TEXT
    assert contrast("#009485", "#ffffff") == pytest.approx(3.75, abs=0.05)
