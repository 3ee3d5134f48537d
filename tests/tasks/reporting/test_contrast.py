"""Contrast in figures: lines, bars and marks at least 3:1, numbers at least 4.5:1 (WCAG 2.2, 1.4.11 and 1.4.3)."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from tasks.comparing.report import _COLOURS
from tasks.reporting.figures import DARK, LIGHT, Theme, blocks_figure, confusion_figure
from tests.support.checkout import PROJECT

MARKS, TEXT = 3.0, 4.5


def contrast(colour: object, ground: object) -> float:
    """WCAG's ratio of two colours; a colour that lets the ground through is mixed with it."""
    *front, alpha = to_rgba(colour)  # type: ignore[arg-type]
    behind = np.array(to_rgba(ground)[:3])  # type: ignore[arg-type]
    light = [_luminance(alpha * np.array(front) + (1 - alpha) * behind), _luminance(behind)]
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


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_each_colour_of_a_figure_stands_out_from_its_ground(theme: Theme) -> None:
    lines = [theme.accent, theme.second, theme.muted, theme.ink, *_COLOURS]
    assert [colour for colour in lines if contrast(colour, theme.ground) < MARKS] == []


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_each_bar_of_a_block_stands_out_from_its_ground(theme: Theme) -> None:
    blocks = pd.DataFrame(
        {
            "block": ["w1", "w2"],
            "spent_epsilon": [1.0, 2.0],
            "cap_epsilon": [3.0, 3.0],
            "retired": [True, False],
        }
    )
    bars = blocks_figure(blocks, theme=theme).axes[0].patches
    assert len(bars) == 2
    assert min(contrast(bar.get_facecolor(), theme.ground) for bar in bars) >= MARKS


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_each_number_of_a_confusion_is_readable_on_its_cell(theme: Theme) -> None:
    """Cells from a hundredth to all of a class."""
    shares = (1, 25, 45, 55, 75, 90, 100)
    names = [f"class {share}" for share in shares]
    rows = [
        (name, names[(index + (record >= share)) % len(names)])
        for index, (name, share) in enumerate(zip(names, shares, strict=True))
        for record in range(100)
    ]
    pairs = pd.DataFrame(rows, columns=["actual", "predicted"])
    axes = confusion_figure(pairs, names, theme=theme).axes[0]
    (image,) = axes.images
    cells = np.asarray(image.get_array())
    ratios = []
    for text in axes.texts:
        column, row = text.get_position()
        ratios.append(contrast(text.get_color(), image.cmap(image.norm(cells[int(row), int(column)]))))
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
