"""Epsilons that are stated beside exact ones, and how long noise takes to be found: `python -m benchmarks.accounting`.

Prints the tables of docs/explanation/accountants.md. The exact values are computed apart from the product: by mpmath
(closed forms; the divergence of two records by quadrature) and by an inverse Laplace transform (samples and groups)
that agrees with dp_accounting at ever finer grids.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import dp_accounting as dp
import typer
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, REPLACE_ONE, epsilon, group_privacy, rdp
from algorithms.privacy.accounting.events import Schedule, schedule_to_json
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.ledger import choose_composition


@dataclass(frozen=True)
class Case:
    """A run: what it releases at a noise multiplier, and what it exactly costs at one of them."""

    name: str
    schedule_at: Callable[[float], Schedule]
    multiplier: float
    delta: float
    exact: float
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE


def schedule_at(rate: float, steps: int, count: int, multiplier: float) -> Schedule:
    """Steps on Poisson samples, or on all records at a rate of 1, for so many records of a person."""
    noise = dp.GaussianDpEvent(multiplier)
    event = noise if rate == 1 else dp.PoissonSampledDpEvent(rate, noise)
    return [(group_privacy(event, count), steps)]


def cases() -> Iterator[Case]:
    """All cases, with their exact epsilons."""
    for rate, multiplier, steps, count, delta, exact in (
        (1.0, 1.0, 1, 1, 1e-15, 8.165579696),
        (1.0, 1500.0, 1, 1, 1e-9, 0.00289364303247),
        (1.0, 9164.0, 9999, 1, 1e-5, 0.02999406249),
        (1.0, 5440.0, 9000, 1, 1e-5, 0.0504120438744),
        (1.0, 3731.0, 10**6, 1, 1e-5, 0.9998915804),
        (0.001, 20.0, 1000, 1, 1e-7, 0.0055238605),
        (0.001, 21.8, 5000, 1, 1e-6, 0.009947515789),
        (0.001, 7.936, 5000, 1, 1e-6, 0.029956057503),
        (0.001, 100.0, 100, 1, 1e-8, 0.00033692419412),
        (0.01, 77.38, 1000, 1, 1e-5, 0.0099637420044),
        (0.01, 545.3, 1000, 1, 1e-5, 0.0009999682955),
        (0.01, 1000.0, 1000, 1, 1e-6, 0.00074311143269),
        (0.01, 1.0, 1000, 1, 1e-5, 1.828236667),
        (0.01, 1.0, 1000, 1, 1e-15, 4.854537751),
        (0.01, 0.1085, 1000, 1, 1e-5, 999.5200037),
        (0.1, 549.55, 10**6, 1, 1e-9, 0.9999607721),
        (1e-4, 0.8, 10**6, 1, 1e-8, 1.0017694403),
        (1e-4, 0.768, 10**6, 1, 1e-7, 0.99921543),
        (0.01, 1.0, 1000, 2, 1e-5, 3.979085763),
        (0.01, 1.0, 1000, 3, 1e-5, 6.342932974),
        (0.05, 2.0, 200, 4, 1e-5, 7.671392337),
        (0.02, 2.2, 500, 7, 1e-6, 8.24264629),
        (0.004, 0.5, 1, 33, 1e-5, 21.99167002),
        (0.001, 0.9, 1, 64, 1e-6, 4.022498216),
    ):
        name = f"{rate:g}, {multiplier:g}, {steps:,}, {count}"
        yield Case(name, partial(schedule_at, rate, steps, count), multiplier, delta, exact)
    yield Case(
        "10 of 100 without replacement, 1, 1, 1",
        lambda noise: [(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(noise)), 1)],
        1.0,
        1e-5,
        6.57553980628,
        REPLACE_ONE,
    )


def accountant_rows() -> Iterator[str]:
    """What each case is stated to cost, and how long that and the noise for it take."""
    for case in cases():
        start = time.process_time()
        stated = epsilon(case.schedule_at(case.multiplier), case.delta, adjacency=case.adjacency)
        middle = time.process_time()
        calibrate(case.schedule_at, Budget(case.exact, case.delta), adjacency=case.adjacency)
        end = time.process_time()
        yield (
            f"| {case.name} | {case.delta:g} | {case.exact:.6g} | {stated:.6g}"
            f" | {max(0.0, stated / case.exact - 1):.1e} | {middle - start:.2f} | {end - middle:.2f} |"
        )


def ledger_rows() -> Iterator[str]:
    """What the ledger charges, beside what is exact for runs that were fixed in advance, and a general bound."""
    step = dp.PoissonSampledDpEvent(0.005, dp.GaussianDpEvent(2.5))
    start = time.process_time()
    (stated,) = rdp([(group_privacy(step, 2), 2818)], orders=(6.0,))
    seconds = time.process_time() - start
    yield (
        "| two blocks a person, rate 0.005, multiplier 2.5, 2,818 steps: divergence of order 6"
        f" | 0.147897 | {stated:.6g} | 0.791 (largest shift) | {seconds:.2f} |"
    )
    for name, rate, multiplier, steps, exact in (
        ("ten of Adult's runs (rate 0.126, 400 steps)", 4096 / 32561, 9.485, 400, 3.10800952),
        ("ten runs at rate 0.01, 1,000 steps", 0.01, 1.415, 1000, 2.98605478),
    ):
        start = time.process_time()
        chosen = choose_composition(
            10,
            cost=Budget(1.0, 1e-5),
            events=schedule_to_json(schedule_at(rate, steps, 1, multiplier)),
            adjacency=ADD_OR_REMOVE_ONE.name,
            cap=Budget(10.0, 1e-4),
        )
        seconds = time.process_time() - start
        yield (
            f"| {name} at epsilon 1, delta 1e-5: of a cap at delta 1e-4"
            f" | {exact:.6g} | {chosen.all:.3g} | {chosen.sums:g} (sums) | {seconds:.2f} |"
        )


def main() -> None:
    """Print the tables."""
    typer.echo(
        "| rate, multiplier, steps, records | delta | exact | stated | above | seconds | to find the noise |"
    )
    typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for row in accountant_rows():
        typer.echo(row)
    typer.echo("\n| what the ledger charges | exact | stated | general bound | seconds |")
    typer.echo("| --- | --- | --- | --- | --- |")
    for row in ledger_rows():
        typer.echo(row)


if __name__ == "__main__":
    typer.run(main)
