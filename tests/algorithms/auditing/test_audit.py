"""The audit of a method finds faults that are planted in the barrier and the mechanisms, and accuses nobody else."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from algorithms.auditing.audit import Audit, audit
from algorithms.auditing.bounds import family, many_runs
from algorithms.auditing.game import Game, key_of, play
from algorithms.auditing.likelihood import _tree_noise, contribution
from algorithms.auditing.mechanism_audit import audit_mechanisms
from algorithms.errors import RefusedError
from algorithms.gradients import Engine
from algorithms.gradients.clipping import Unclipped
from algorithms.privacy.barrier import unnoised_queries
from algorithms.privacy.mechanisms import correlated, release_noise
from algorithms.privacy.mechanisms.sampling import draw_sample
from tests.support.costs import costs_once
from tests.support.soak import soak_but

__all__ = ["costs_once"]

Fault = Callable[[pytest.MonkeyPatch], None]


def quick(method: str = "dp_sgd", seed: int = 0, predicts: Any = "class", **settings: Any) -> Audit:
    """A fast audit: the parts of the claim are looked at as always, the attacks are weak."""
    game = Game(method, settings, 2.0, 1e-5, 1, accountant="rdp", predicts=predicts)
    return audit(game, runs=1, canaries=240, seed=seed)


@cache
def honest() -> Audit:
    """Of DP-SGD without a fault."""
    return quick()


def half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = release_noise.draws
    monkeypatch.setattr(release_noise, "draws", lambda *args: 0.5 * drawn(*args))
    for kind in (correlated._Recursion, correlated._Tree):
        step = kind.draw
        monkeypatch.setattr(kind, "draw", lambda *args, step=step: 0.5 * step(*args))


def one_layer_unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = Engine.clipped_sum

    def skipping(
        self: Engine, point: Tensor, inputs: Tensor, labels: Tensor, clipping: Any, _out: Tensor | None
    ) -> Tensor:
        total = clipped(self, point, inputs, labels, clipping).clone()
        layer = slice(len(total) // 2, None)
        total[layer] = clipped(self, point, inputs, labels, Unclipped())[layer]
        return total

    monkeypatch.setattr(Engine, "clipped_sum", skipping)


def coins_shared_by_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    last = []

    def shared(*args: Any, **given: Any) -> Any:
        own = draw_sample(*args, **given)
        last.append(own if len(last) % 4 != 1 else last[-1])
        return last[-1]

    monkeypatch.setattr(unnoised_queries, "draw_sample", shared)


def a_record_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*args: Any, **given: Any) -> Any:
        rows = draw_sample(*args, **given)
        return np.append(rows, rows[-1:])

    monkeypatch.setattr(unnoised_queries, "draw_sample", twice)


def gains_unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped = Engine.clipped_loss_gain
    monkeypatch.setattr(Engine, "clipped_loss_gain", lambda *given: clipped(*given[:-1], 1e9))


@pytest.mark.parametrize("predicts", soak_but(["class", "number"], ["class", "number", "count"]))
def test_a_shrinkage_is_audited_with_its_releases(monkeypatch: pytest.MonkeyPatch, predicts: str) -> None:
    assert not quick(shrink_share=0.05, predicts=predicts).is_violated
    if predicts != "number":
        return  # one function clips the gains of all
    assert not quick(shrink_share=0.05, error_share=0.05, predicts=predicts).is_violated
    gains_unclipped(monkeypatch)
    found = quick(shrink_share=0.05, predicts=predicts)
    assert [check.name for check in found.checks if check.is_violated] == ["reach of a record"]


def test_the_releases_of_a_number_are_among_the_answers_and_charged() -> None:
    """Its histogram and its mean before the steps, its gain after them."""
    game = Game("dp_sgd", {"shrink_share": 0.05}, 2.0, 1e-5, 1, accountant="rdp", predicts="number")
    played = play(game, game.plan(), np.array([True]), key_of("number"))
    assert [answer.kind for answer in played.answers] == ["total", "total", *["gradient"] * 4, "loss gain"]
    assert len(played.events) == len(played.answers)
    moved = [contribution(game, answer, game.canary(0)) for answer in played.answers[:2]]
    assert [float(np.abs(one).sum()) for one in moved] == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (half_the_noise, "noise"),
        (one_layer_unclipped, "reach of a record"),
        (coins_shared_by_two_steps, "coins of two releases"),
        (a_record_counted_twice, "reach of a record"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault, part: str) -> None:
    fault(monkeypatch)
    found = quick()
    assert part in [check.name for check in found.checks if check.is_violated]
    assert found.is_violated


def test_honest_methods_are_not_accused() -> None:
    for found in (honest(), *map(quick, ("dp_gd", "objective_perturbation"))):
        assert not found.is_violated, found.to_json()
        assert found.epsilon_lower_bound <= found.claimed


def test_the_bound_is_near_that_of_the_normal_laws_themselves() -> None:
    """One Gaussian release, whose worst case is exactly the claim; the seed is fixed.

    Of as many pairs that are spread evenly over both laws; by chance the bound of pairs of runs lies a fifth off.
    """
    game, pairs = Game("dp_gd", {"steps": 1, "clip_norm": 1.0}, 10.0, 1e-5, 1), 100
    plan = game.plan()
    mu, draws = 1.0 / plan.noise_multiplier, norm.ppf((np.arange(pairs) + 0.5) / pairs)
    ratios = np.stack([mu * draws - mu**2 / 2, mu * draws + mu**2 / 2], axis=1)
    by_law = many_runs(ratios, *family(plan), game.delta).epsilon_lower_bound
    assert by_law > 0.4 * plan.cost.epsilon
    found = audit(game, runs=pairs, canaries=50)
    of_pairs = found.attacks[0]
    assert of_pairs.name == "worst record, many runs"
    assert 0.5 * by_law < of_pairs.epsilon_lower_bound <= found.epsilon_lower_bound <= found.claimed


def test_half_of_the_noise_would_have_been_seen() -> None:
    assert honest().power.caught > 0.99


def test_what_claims_nothing_is_refused() -> None:
    with pytest.raises(RefusedError, match="claims no privacy"):
        quick("lbfgs")


def test_a_records_reach_is_seen_in_both_layers() -> None:
    features = torch.from_numpy(Game("dp_sgd", {}, 1.0, 1e-5, 1).canary(0))
    assert int((features != 0).sum()) == 2


CORRELATED = [("dp_ftrl", {}), ("matrix_factorisation", {"participation": "fixed_order", "bands": 2})]


def noise_without_its_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    def anew(self: Any, stream: Any) -> Any:
        return stream.normal(self._dimension)

    monkeypatch.setattr(correlated._Recursion, "draw", anew)
    monkeypatch.setattr(correlated._Tree, "draw", anew)


def a_record_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        unnoised_queries, "draw_sample", lambda _sampling, records, _stream, step: np.arange(records)
    )


FAULTS = [
    (half_the_noise, "noise"),
    (noise_without_its_correction, "noise of two releases"),
    (one_layer_unclipped, "reach of a record"),
    (a_record_in_every_step, "steps between"),
]
OF_THE_NOISE = [(*method, *fault) for method in CORRELATED for fault in FAULTS[:2]]
OF_THE_SUM = [(*CORRELATED[0], *FAULTS[2]), (*CORRELATED[1], *FAULTS[3])]


@pytest.mark.parametrize(
    ("method", "settings", "fault", "part"),
    soak_but(OF_THE_NOISE + OF_THE_SUM, [(*method, *fault) for method in CORRELATED for fault in FAULTS]),
)
def test_a_fault_in_correlated_noise_is_found(
    method: str, settings: dict[str, Any], fault: Fault, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is half_the_noise:
        assert not quick(method, **settings).is_violated
    fault(monkeypatch)
    assert part in [check.name for check in quick(method, **settings).checks if check.is_violated]


def test_the_noise_of_a_tree_is_the_one_that_is_stated() -> None:
    """What an audit takes for it, beside the variances that the strategy states, with trees that are not whole."""
    mixed = _tree_noise(5, 13)
    assert np.square(mixed).sum(axis=1) == pytest.approx(correlated.Tree(5).variances(13))


def test_every_mechanism_is_tested_at_its_two_worst_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(found.attack.is_violated for found in audit_mechanisms(draws=200))
    exact = ("Gaussian", "Gaussian, correlated over four steps", "Laplace")
    honest = audit_mechanisms(draws=2000, only=exact)
    assert all(0.75 * found.claimed < found.attack.epsilon_lower_bound <= found.claimed for found in honest)
    half_the_noise(monkeypatch)
    assert all(found.attack.is_violated for found in audit_mechanisms(draws=2000, only=exact))
