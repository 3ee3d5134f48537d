"""The words of the pipeline for refusals: keys of params.yaml, stages, and commands of `epsilonflow`."""

from dataclasses import replace

from algorithms.errors import Words

PIPELINE = Words(
    prefixes={
        "method": "algorithm.",
        "target": "privacy.",
        "compute": "performance.",
        "network": "model.",
        "learned": "features.",
        "records": "data.",
    },
    names={
        "method.kind": "algorithm.name",
        "learned.kind": "features.name",
        "population.cap": "the data card's cap",
        "population.composition": "the data card's composition",
        "population.raise_cap": "raises the cap by `epsilonflow ledger cap`",
        "plan.remedy": "run the calibrate stage again",
        "run.steps": "all stages",
        "run.remedy": "run the stages again",
    },
    sentences={
        "block_changed": "the block {block!r} of population {population!r} does not hold the records that were charged:"
        " some were changed, added or removed since. A person who came from another block would have a second cap here."
        " Bring the charged records back and give new ones a block of their own; or let the owner of the data say that"
        " everybody in it stays in it, by `epsilonflow ledger overrule {population} {block}`.",
        "block_repeated": "the blocks {other!r} and {block!r} of population {population!r} hold exactly the same"
        " records, and a record is in {allowed}; leave {block!r} out, or let the owner of the data say that these are"
        " other people, by `epsilonflow ledger overrule {population} {block} {other}`.",
        "block_unknown": "population {population!r} has no block {block!r} (it has {known}); `epsilonflow ledger block"
        " {population} {block}` declares it, and so does the first run on it.",
        "code_not_allowed": "{file} names code, {name!r}, which would run here; if it is yours and you trust it with"
        " what the file says, allow it by --allow-code {name} (in Python allow_code=[{name!r}]).",
        "no_cells": "features.name is histograms, which is of a table whose columns are encoded as cells, and these"
        " records are not; set it to none, or declare reader.cells in the data card.",
        "noise_elsewhere": "run {run_id!r} is reserved by another home with the same owner key, which has its noise;"
        " wait for its end there, or give it up by `epsilonflow ledger forfeit {run_id}` where that home is gone.",
        "nothing_frozen_to_shard": "the model {model} has no frozen parameters to shard; set performance.shard_frozen"
        " to false, and performance.shard_trained to true to shard the others.",
        "pass_exceeds_memory": "a pass of {size} records of the model {model} does not fit the memory of the device"
        " {device}; set performance.physical_batch or performance.memory_mb to less.",
        "run_unknown": "the ledger has no reservation of run {run_id!r}; `epsilonflow ledger history` lists those it"
        " has.",
        "words_unstated": "the data card does not say by words_sha256 which words the tokens stand for, and word"
        " vectors need it; add to the card's reader the SHA-256 of datasets/prepared/words.txt, and prepare again.",
    },
)

_ABOVE_RECORDS = (
    "a batch of {{batch}} was asked for, but an audit ignores your data: its smallest game has {{records}} synthetic"
    " records; set {{method.{name}}} to at most {{records}}."
)
AUDITS = replace(
    PIPELINE,
    prefixes={**PIPELINE.prefixes, "method": ""},
    sentences={
        **PIPELINE.sentences,
        "batch_above_records": _ABOVE_RECORDS.format(name="expected_batch_size"),
        "sample_above_records": _ABOVE_RECORDS.format(name="batch_size"),
    },
)
"""The words of an audit, whose settings are named without their group."""
