"""The audit of methods as a Prefect flow: lower bounds on epsilon from the installed code, on synthetic records."""

import os
from functools import partial
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from flows.pipeline import REFUSED, Delta, Epsilon, Seed
from tasks.auditing import Asked, audit_all, audit_one, auditable, check
from tasks.runs.stages import checkout, refusals


@task(name="audit", retries=0, cache_policy=NO_CACHE, persist_result=False)
def audit_task(asked: Asked, workers: int) -> tuple[bool, str]:
    """Audit one method; returns whether its claim is violated, and the findings as a sentence."""
    return audit_one(asked, checkout(), workers=workers)


@flow(name="audit", retries=0, persist_result=False)
def audit(
    method: str | None = None,
    epsilon: Epsilon = 4.0,
    delta: Delta = 1e-5,
    settings: dict[str, Any] | None = None,
    runs: Annotated[int, Field(ge=1)] = 1000,
    canaries: Annotated[int, Field(ge=8)] = 400,
    seed: Seed = 0,
    workers: Annotated[int, Field(ge=1)] | None = None,
) -> State[Any]:
    """Attack the installed code to look for more leakage than a method claims; spends nothing.

    Args:
        method: a registered method, or package.module:factory; if empty, all methods that claim privacy.
        epsilon: the claimed epsilon.
        delta: the claimed delta.
        settings: settings of the method; those left out get small defaults.
        runs: pairs of runs with and without the worst record.
        canaries: number of canaries in the single run.
        seed: seed of the audit; the same seed gives the same findings.
        workers: number of parallel processes; if empty, the number of cores.
    """
    every = [
        Asked(name, settings or {}, epsilon, delta, runs, canaries, seed)
        for name in ([method] if method else auditable())
    ]
    one = partial(audit_task, workers=workers or os.cpu_count() or 1)
    try:
        for asked in every:
            check(asked)
        is_violated, said = audit_all(every, one, say=get_run_logger().info)
    except refusals() as refusal:
        return Failed(name=REFUSED, message=str(refusal))
    return Failed(message=said) if is_violated else Completed(message=said)
