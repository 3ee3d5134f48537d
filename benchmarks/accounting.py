"""Epsilons that are stated beside exact ones, and how long noise takes to be found: `python -m benchmarks.accounting`.

Prints the table of docs/explanation/accountants.md. The exact values are by mpmath (closed forms), and by an inverse
Laplace transform (samples and groups) that agrees with dp_accounting at ever finer grids.
"""

import time

import dp_accounting as dp
import typer

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import calibrate, epsilon, group_privacy
from algorithms.privacy.accounting.events import Schedule

CASES = [
    (1.0, 1.0, 1, 1, 1e-15, 8.165579696),
    (1.0, 9164.0, 9999, 1, 1e-5, 0.02999406249),
    (1.0, 3731.0, 10**6, 1, 1e-5, 0.9998915804),
    (0.001, 20.0, 1000, 1, 1e-7, 0.0055238605),
    (0.001, 21.8, 5000, 1, 1e-6, 0.009947515789),
    (0.01, 545.3, 1000, 1, 1e-5, 0.0009999682955),
    (0.01, 1.0, 1000, 1, 1e-5, 1.828236667),
    (0.01, 1.0, 1000, 1, 1e-15, 4.854537751),
    (0.01, 0.1085, 1000, 1, 1e-5, 999.5200037),
    (0.1, 549.55, 10**6, 1, 1e-9, 0.9999607721),
    (1e-4, 0.8, 10**6, 1, 1e-8, 1.0017694403),
    (0.01, 1.0, 1000, 2, 1e-5, 3.979085763),
    (0.01, 1.0, 1000, 3, 1e-5, 6.342932974),
    (0.05, 2.0, 200, 4, 1e-5, 7.671392337),
    (0.02, 2.2, 500, 7, 1e-6, 8.24264629),
    (0.004, 0.5, 1, 33, 1e-5, 21.99167002),
    (0.001, 0.9, 1, 64, 1e-6, 4.022498216),
]
"""The rate of samples, the noise multiplier, steps, the number of records of a person, delta, and the exact epsilon."""


def schedule_of(rate: float, multiplier: float, steps: int, count: int) -> Schedule:
    """The releases of a case."""
    noise = dp.GaussianDpEvent(multiplier)
    event = noise if rate == 1 else dp.PoissonSampledDpEvent(rate, noise)
    return [(group_privacy(event, count), steps)]


def main() -> None:
    """Print the table."""
    typer.echo(
        "| rate, multiplier, steps, records | delta | exact | stated | above | seconds | to find the noise |"
    )
    typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for rate, multiplier, steps, count, delta, exact in CASES:
        start = time.process_time()
        stated = epsilon(schedule_of(rate, multiplier, steps, count), delta)
        middle = time.process_time()
        calibrate(lambda z: schedule_of(rate, z, steps, count), Budget(exact, delta))  # noqa: B023
        end = time.process_time()
        typer.echo(
            f"| {rate:g}, {multiplier:g}, {steps:,}, {count} | {delta:g} | {exact:.6g} | {stated:.6g}"
            f" | {max(0.0, stated / exact - 1):.1e} | {middle - start:.2f} | {end - middle:.2f} |"
        )


if __name__ == "__main__":
    typer.run(main)
