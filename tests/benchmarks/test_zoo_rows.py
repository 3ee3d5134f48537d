"""The commands behind docs/zoo.md make their lines."""

import pytest

from benchmarks import families, zoo


def test_an_architecture_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    zoo.main(["bilinear"])
    assert capsys.readouterr().out.startswith("| bilinear | 1,251 | batched |")


@pytest.mark.soak
def test_a_family_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["starnet"])
    assert capsys.readouterr().out.startswith("starnet: starnet_s050, 64 pixels, batched, error ")
