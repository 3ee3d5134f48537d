"""The words of the scikit-learn estimators for refusals: their parameters, and the settings of their `method`."""

from algorithms.errors import Words
from algorithms.fit_refusals import FIT

ESTIMATORS = Words(
    prefixes=FIT.prefixes,
    names=FIT.names,
    sentences={
        **FIT.sentences,
        "accountant_without_bound": "these releases have no bound by PLD, by which estimators count; give another"
        " method.",
        "answer_short_of_memory": "memory did not suffice for an answer; free some, or train where there is more.",
        "delta_of_accountant": "delta is {delta:g}, and estimators count by PLD, which needs one above 0; set delta to"
        " one, customarily to 1/n or less.",
        "losses_spread_too_far": "privacy losses spread over more than {largest} points of a grid, which are not"
        " computed; set epsilon to less, which takes more noise, or give another method.",
        "no_bound_by_pld": "no bound is known by PLD, by which estimators count, for {mechanism}; give another method.",
        "not_purely_private": "delta is 0, and the noise of a release ({mechanism}) is not purely private; set delta"
        " above 0.",
        "pass_exceeds_memory": "a pass of {size} records does not fit the memory of the device {device}; set device to"
        " cpu, or train where there is more memory.",
        "plan_not_private": "noise would promise what does not hold: {message} Give another method.",
        "rounding_depends_on_batch": "{why}; set device to cpu.",
    },
)
"""What `fit` says, without its arguments that estimators have not, such as `accountant` and `memory_mb`."""
