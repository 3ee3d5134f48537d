"""The figures of a report."""

import pandas as pd
import pytest

from tasks.reporting.figures import DARK, LIGHT, Drawing, class_figure, confusion_figure, picture, png

_NAMES = ("a short name", "a name that takes much of the width of a figure", "x")
_PAIRS = pd.DataFrame({"actual": _NAMES * 3, "predicted": [name for name in _NAMES for _ in range(3)]})
_CLASSES = pd.DataFrame({"class": _NAMES, "accuracy": (0.5, 0.75, 1.0), "records": (4, 4, 5)})
_DRAWINGS: tuple[Drawing, ...] = (
    lambda theme: confusion_figure(_PAIRS, _NAMES, theme=theme),
    lambda theme: class_figure(_CLASSES, overall=0.8, theme=theme),
)


@pytest.fixture
def quick_work() -> None:
    """Figures are really drawn."""


def test_a_layout_found_in_light_colours_is_that_of_the_dark_figure() -> None:
    for draw in _DRAWINGS:
        drawn = picture(draw, "")
        assert drawn.light == png(draw(LIGHT))
        assert drawn.dark == png(draw(DARK))
        assert drawn.narrow_dark == png(draw(DARK.narrow))
