"""The types of metrics.json, against what `tasks.evaluate` writes there."""

from dataclasses import fields

import pytest

from tasks.evaluate import (
    ClassMetrics,
    CountMetrics,
    LabelMetrics,
    NextTokenMetrics,
    NumberMetrics,
    QuantileMetrics,
    TagMetrics,
)
from tasks.runs.metrics_document import PublicMetrics, is_private

KINDS = (
    ClassMetrics,
    CountMetrics,
    LabelMetrics,
    NextTokenMetrics,
    NumberMetrics,
    QuantileMetrics,
    TagMetrics,
)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_each_kind_of_target_have_their_keys(kind: type) -> None:
    stated = PublicMetrics.__annotations__
    assert {metric.name for metric in fields(kind)} <= stated.keys()


def test_metrics_are_private_where_they_say_so() -> None:
    assert is_private({"held_out": "private", "evaluation_epsilon": 1.0})
    assert not is_private({"test_accuracy": 0.5}) and not is_private({})
