"""The report's pictures have the numbers they are drawn from, and the same bytes each time."""

import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from tasks.reporting.figures import (
    LIGHT,
    Curve,
    class_figure,
    confusion_figure,
    epsilon_figure,
    noise_figure,
    png,
)
from tests.support.synthetic_run import CLASSES


def test_pictures_show_the_numbers() -> None:
    classes = pd.DataFrame({"class": list(CLASSES), "accuracy": [0.5, 0.25, np.nan], "records": [4, 4, 0]})
    bars = class_figure(classes, overall=0.4, theme=LIGHT).axes[0]
    assert [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)] == [0.5, 0.25, 0.0]
    assert np.asarray(bars.lines[0].get_xdata())[0] == 0.4
    pairs = pd.DataFrame({"actual": ["cat", "cat", "dog"], "predicted": ["cat", "owl", "dog"]})
    shares = confusion_figure(pairs, CLASSES, theme=LIGHT).axes[0].images[0].get_array()
    assert shares is not None
    assert shares.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    tight, bound = Curve([1, 2], [0.5, 0.7]), Curve([1, 2], [0.6, 0.9])
    allowed, dashed, solid = epsilon_figure(tight, bound, target=1.0, theme=LIGHT).axes[0].lines
    assert np.asarray(solid.get_ydata()).tolist() == [0.5, 0.7]
    assert np.asarray(dashed.get_ydata()).tolist() == [0.6, 0.9]
    assert np.asarray(allowed.get_ydata())[0] == 1.0


def test_pictures_are_the_same_bytes_again() -> None:
    trace = pd.DataFrame({"kind": ["gradient"] * 3, "step": [0, 1, 2], "noise_std": [0.5, 0.5, 0.6]})
    first, second = (png(noise_figure(trace, theme=LIGHT)) for _ in range(2))
    assert first == second


def test_a_cost_so_far_that_no_theorem_makes_the_cost_of_a_stop_is_drawn_as_one() -> None:
    curve = Curve([1, 2], [0.2, 0.3])
    fixed, chosen = (
        epsilon_figure(curve, curve, target=1.0, theme=LIGHT, is_fixed=is_fixed).axes[0]
        for is_fixed in (True, False)
    )
    assert [line.get_label() for line in fixed.lines][1:] == [
        "bound kept while training",
        "accounted afterwards",
    ]
    assert [line.get_label() for line in chosen.lines][1:] == ["added up so far, no bound for ending there"]
