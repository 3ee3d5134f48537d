"""The commands behind docs/zoo.md and benchmarks/results/zoo.md make their lines."""

from collections.abc import Mapping

import pytest
from torch import Tensor

from algorithms.gradients import Engine
from benchmarks import families, sizes, zoo
from benchmarks.measure import Timed

SECONDS = [
    {"ours": 2.0, "plain": 3.0, "hooks": 9.0, "ghost": 5.0},
    {"ours": 4.0, "plain": 3.0, "hooks": 2.0, "ghost": 5.0},
]
"""Of a step of many records and of few."""


def test_an_architecture_has_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speeds are the seconds of others over ours, with the faster mode of Opacus, whichever that is."""
    batches = iter(SECONDS)

    def stated(steps: Mapping[str, Timed], *_: object) -> dict[str, list[float]]:
        for step in steps.values():
            step.step()
        seconds = next(batches)
        return {name: [seconds[name]] for name in steps}

    monkeypatch.setattr(zoo, "alternate", stated)
    zoo.main(["soft mixture of experts"])
    row = capsys.readouterr().out
    assert row.startswith("| soft mixture of experts | 731 | batched |")
    records, _, error, *speeds = [cell.strip() for cell in row.split("|")[4:11]]
    # of the engine for 16 records each of its sizes
    usual, *few = map(int, records.replace("/", ", ").split(", "))
    assert 16 in few and max(few) < usual and float(error) < 1e-5
    assert speeds == ["1.50", "2.5", "0.75", "0.5"]


def test_an_architecture_has_its_speeds_at_given_batches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the shortest rounds, and for each batch those of its own records."""
    records: list[int] = []

    def sum_of(_: Engine, __: Tensor, inputs: Tensor, *___: object) -> None:
        records.append(len(inputs))

    def stated(steps: Mapping[str, Timed], *_: object) -> dict[str, list[float]]:
        steps["ours"].step()
        return {"ours": [3.0, 2.0], "plain": [1.0, 5.0]}

    monkeypatch.setattr(Engine, "clipped_sum", sum_of)
    monkeypatch.setattr(zoo, "alternate", stated)
    zoo.main(["embedding bag, sum", "--at", "8,32"])
    assert capsys.readouterr().out == "| embedding bag, sum | 0.50 | - | 0.50 | - |\n"
    assert records == [8, 32]


@pytest.mark.soak
def test_a_family_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["starnet"])
    assert capsys.readouterr().out.startswith("starnet: starnet_s050, 64 pixels, batched, error ")


def test_a_model_at_a_size_of_use_has_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "alternate", lambda *_: {"ours": [0.004] * 3, "plain": [0.003] * 3})
    monkeypatch.setattr(sizes, "growth", lambda step: step() is None or 7.0)
    sizes.main(["embedding bag"])
    assert capsys.readouterr().out == "| embedding bag, 10,000 words | 3.0 | 4.0 | 0.75 | 7 | 7 |\n"
