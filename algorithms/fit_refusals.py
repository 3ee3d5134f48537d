"""The words of `fit` for refusals: its arguments, and the settings of its `method`."""

from algorithms.errors import Words

FIT = Words(
    prefixes={"method": "method."},
    names={"method.kind": "method", "learned.kind": "target_scale"},
    sentences={
        "answer_short_of_memory": "memory did not suffice for an answer; set memory_mb to less.",
        "computes_in_16_bits": "the model {model} computes in 16 bits somewhere, by conversions of its own, though its"
        " precision is float32; take the conversions out.",
        "lbfgs_model": "'lbfgs' finds the minimum of a linear model on features with public bounds, which nothing here"
        " states; take another method.",
        "majority_model": "'majority' sets the bias of a linear model on features with public bounds, which nothing"
        " here states; take another method.",
        "pass_exceeds_memory": "a pass of {size} records of the model {model} does not fit the memory of the device"
        " {device}; set memory_mb to less.",
        "public_bound_missing": "a public bound for {what} is missing, and nothing here states one for features; take a"
        " method that clips, such as DPSGD.",
    },
)
"""A setting of the target or of what computes is an argument, so it has no prefix."""

LEFT_OPEN = "Its end is not in the ledger yet: `epsilonflow ledger forfeit {run_id}`."
"""The note of an exception whose run is still open in its ledger."""
