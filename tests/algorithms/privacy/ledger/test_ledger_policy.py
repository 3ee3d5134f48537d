"""Policies and forecasts: which blocks a retraining uses, what it costs, and when there is none."""

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import (
    BlockBalance,
    Choice,
    Spread,
    exhausted_blocks,
    forecast,
    next_retraining,
)
from algorithms.privacy.ledger.policy import choose_blocks


def _blocks(*left: float, limit: float = 1.0) -> list[BlockBalance]:
    return [BlockBalance(f"b{i}", (limit,), (rest,)) for i, rest in enumerate(left)]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (Choice("last", window=2), ("b4",)),
        (Choice("last", window=4), ("b1", "b4")),
        (Choice("all"), ("b0", "b1", "b4")),
        (Choice("newest"), ("b4",)),
        (Choice("newest", at_least=2), ("b1", "b4")),
    ],
)
def test_a_policy_chooses_among_the_blocks_that_can_pay(choice: Choice, chosen: tuple[str, ...]) -> None:
    blocks = _blocks(0.5, 0.4, 0.1, 0.3, 0.4)
    assert choose_blocks(choice, blocks, (0.35,)) == chosen


def test_a_retired_block_is_passed_over_and_a_window_counts_living_ones() -> None:
    blocks = [
        BlockBalance("a", (1.0,), (1.0,)),
        BlockBalance("b", (1.0,), (1.0,), retired=True),
        BlockBalance("c", (1.0,), (1.0,)),
    ]
    assert choose_blocks(Choice("last", window=2), blocks, (0.5,)) == ("a", "c")


def test_both_epsilon_and_delta_must_fit() -> None:
    blocks = [BlockBalance("a", (1.0, 1e-5), (1.0, 1e-6)), BlockBalance("b", (1.0, 1e-5), (0.1, 1e-5))]
    assert choose_blocks(Choice("all"), blocks, (0.1, 1e-6)) == ("a", "b")
    assert choose_blocks(Choice("all"), blocks, (0.1, 2e-6)) == ("b",)
    assert exhausted_blocks(blocks, (0.2, 1e-6)) == ("b",)


def test_too_few_blocks_skip_the_retraining_and_the_old_model_stays() -> None:
    with pytest.raises(RefusedError) as refused:
        choose_blocks(Choice("last", window=3, at_least=2), _blocks(1.0, 0.1, 0.1, 0.5), (0.3,))
    assert str(refused.value) == (
        "1 of 4 blocks can pay for this retraining and 2 are needed, so it is skipped and the model of the last one"
        " stays; wait for new blocks or plan a cheaper retraining."
    )


@pytest.mark.parametrize(
    ("spread", "prices"),
    [
        (Spread("equal", planned=4), [0.25, 0.25, 0.25, 0.25, 0.0]),
        (Spread("front-loaded", planned=4), [0.4, 0.3, 0.2, 0.1, 0.0]),
        (Spread("geometric", fraction=0.5), [0.5, 0.25, 0.125, 0.0625, 0.03125]),
    ],
)
def test_a_spread_follows_from_what_is_left(spread: Spread, prices: list[float]) -> None:
    left, found = 1.0, []
    for done in range(5):
        (price,) = spread.price((left,), done=done)
        found.append(price)
        left -= price
    assert found == pytest.approx(prices)


def test_what_a_run_did_not_spend_goes_to_the_later_ones() -> None:
    assert Spread("equal", planned=4).price((0.9,), done=1) == pytest.approx((0.3,))


def test_policies_that_make_no_sense_are_refused() -> None:
    for wrong in (
        lambda: Choice("last"),
        lambda: Choice("all", window=2),
        lambda: Choice("last", window=1, at_least=2),
        lambda: Choice("all", at_least=0),
        lambda: Spread("equal"),
        lambda: Spread("equal", planned=0),
        lambda: Spread("equal", planned=3, fraction=0.5),
        lambda: Spread("geometric", planned=3),
        lambda: Spread("geometric", fraction=1.0),
    ):
        with pytest.raises(RefusedError):
            wrong()


def test_blocks_that_were_used_at_different_times_agree_on_a_price() -> None:
    """In a window of 3 with 3 planned retrainings a block every time pays a third of its cap."""
    blocks = [
        BlockBalance("a", (1.0,), (1 / 3,), runs=2),
        BlockBalance("b", (1.0,), (2 / 3,), runs=1),
        BlockBalance("c", (1.0,), (1.0,), runs=0),
    ]
    used, price = next_retraining(
        Choice("last", window=3), Spread("equal", planned=3), blocks, smallest=(0.0,)
    )
    assert used == ("a", "b", "c")
    assert price == pytest.approx((1 / 3,))


def test_a_block_whose_share_is_of_no_use_takes_no_part() -> None:
    blocks = _blocks(0.001, 0.8)
    used, price = next_retraining(Choice("all"), Spread("geometric", fraction=0.5), blocks, smallest=(0.01,))
    assert (used, price) == (("b1",), (0.4,))


def test_a_forecast_of_a_fixed_price_says_how_many_fit_and_which_block_retires_when() -> None:
    found = forecast(_blocks(0.2, 0.35, 1.0), Choice("all", at_least=2), (0.1,), smallest=(0.1,))
    assert [row.blocks for row in found.retrainings] == [("b0", "b1", "b2")] * 2 + [("b1", "b2")]
    assert [row.retires for row in found.retrainings] == [(), ("b0",), ("b1",)]
    assert found.end is not None
    assert found.end.startswith(
        "1 of 1 blocks can pay for this retraining and 2 are needed, so it is skipped"
    )


def test_the_newest_block_is_spent_until_it_is_empty() -> None:
    found = forecast(_blocks(0.2, 0.3), Choice("newest"), (0.1,), smallest=(0.1,))
    assert [row.blocks for row in found.retrainings] == [("b1",)] * 3 + [("b0",)] * 2


def test_a_window_over_arriving_blocks_never_ends_and_charges_no_block_above_its_cap() -> None:
    choice, spread = Choice("last", window=4), Spread("equal", planned=4)
    found = forecast(_blocks(1.0), choice, spread, smallest=(0.0,), arriving=(1.0,))
    assert (found.end, len(found.retrainings)) == (None, 1000)
    charged: dict[str, float] = {}
    for row in found.retrainings:
        for name in row.blocks:
            charged[name] = charged.get(name, 0.0) + row.price[0]
    assert max(charged.values()) <= 1.0 + 1e-9
    assert found.retrainings[9].retires == ("new 6",)
    assert {len(row.blocks) for row in found.retrainings[3:]} == {4}


def test_a_geometric_spread_over_one_block_ends_only_where_a_price_is_of_no_use() -> None:
    found = forecast(_blocks(1.0), Choice("all"), Spread("geometric", fraction=0.5), smallest=(0.01,))
    assert [row.price[0] for row in found.retrainings] == [2.0**-n for n in range(1, 7)]
    assert found.retrainings[-1].retires == ("b0",)
