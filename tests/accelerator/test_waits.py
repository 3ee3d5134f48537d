"""What a step costs in waits and copies, and that no record reaches the device before the charge that pays for it."""

import pytest
import torch

from algorithms.methods import CATALOGUE
from tests.accelerator.recorded_run import ON_THE_HOST, SUM, recorded

CHOICE = {"unnoised_queries.clipped_losses": 1}
IMPORTANCE = {"importance_sampling.importance_sum": 1}
STATISTIC = {"unnoised_queries.statistic_sum": 1}
ONE_SUM = (408 + 8 * 15, SUM)
"""Noise in 64 bits for 51 parameters, and the indices of the 15 records that are drawn in this step of 40."""
PLACED = {"record_loader.of": 2}
"""The records and their labels, which move to the device after the first charge."""
RESIDENT: dict[str, tuple[int, dict[str, int]]] = {
    "dp_sgd": ONE_SUM,
    "dp_sgd_decay": ONE_SUM,
    "quantile_clipping": (408 + 8 * (9 + 9), SUM | {"unnoised_queries._norms": 1}),
    "adaclip": (408 + 8 * 15, SUM | {"clipping._facts": 1}),
    "adp_sgd": ONE_SUM,
    "matrix_factorisation": ONE_SUM,
    "dp_ftrl": (488, SUM),
    "dp_gd": (408, {}),
    "dp_agd": (136 + 8 * 11, CHOICE),
    "dpis": (408 + 32 * 11, IMPORTANCE),
    "heavy_ball": (408, {}),
    "nesterov": (408, {}),
    "objective_perturbation": (68, {}),
    "output_perturbation": (68, {}),
    "priv_gene": (0, CHOICE),
    "norm_bound_sgd": ONE_SUM,
    "sgd_adv": ONE_SUM,
    "sgd_ma": ONE_SUM,
    "majority": (3212, PLACED | STATISTIC),
    "lbfgs": (68, {}),
    "non_private": (8 * 15, SUM),
}
"""Bytes that a step copies to the device, and which functions wait how often, with records that fit there."""
STREAMING: dict[str, tuple[int, dict[str, int]]] = {
    "dp_sgd": (408 + 72 * 2_056, SUM),
    "adaclip": (408 + 72 * 2_056, SUM | {"clipping._facts": 1}),
    "quantile_clipping": (408 + 72 * (2_018 + 1_994), SUM | {"unnoised_queries._norms": 1}),
    "dp_gd": (1_440_408, SUM),
    "dpis": (408 + (72 + 24) * 2_036, IMPORTANCE),
    "priv_gene": (1_440_000, CHOICE | {"linear.__init__": 79}),
    "majority": (1_440_012, STATISTIC),
}
"""The same where records of 72 bytes are streamed in passes of 256: 2,000 of them, or all 20,000."""


def test_each_method_of_the_catalogue_is_counted() -> None:
    assert RESIDENT.keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", list(RESIDENT))
def test_a_step_waits_and_copies_as_counted(name: str, sim: torch.device) -> None:
    step = recorded(name).step
    assert (step.bytes_to_device, step.waits) == RESIDENT[name]


@pytest.mark.parametrize("name", list(RESIDENT))
def test_no_release_waits_twice_once_records_are_there(name: str, sim: torch.device) -> None:
    for step in recorded(name).steps[1:]:
        charges = sum(event.kind == "charge" for event in step.all)
        assert step.waits.total() <= charges + (name == "adaclip")  # whose terms follow from the step before


@pytest.mark.parametrize("name", list(STREAMING))
def test_streaming_waits_no_more_and_ends_where_the_cpu_does(name: str, sim: torch.device) -> None:
    run = recorded(name, streamed=True)
    assert (run.step.bytes_to_device, run.step.waits) == STREAMING[name]
    expected = recorded(name, streamed=True, device="cpu").released
    torch.testing.assert_close(run.released, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(RESIDENT))
def test_records_that_fit_move_once_after_the_first_charge(name: str, sim: torch.device) -> None:
    assert recorded(name).copies_of_records() == ([] if name in ON_THE_HOST else [True])


@pytest.mark.parametrize("name", list(STREAMING))
def test_streamed_records_move_between_their_own_charge_and_its_answer(name: str, sim: torch.device) -> None:
    run = recorded(name, streamed=True)
    charges = sum(event.kind == "charge" for event in run.events.all)
    copies = run.copies_of_records()
    assert len(copies) > charges and all(copies)
