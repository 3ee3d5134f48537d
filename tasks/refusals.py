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

KINDS = {
    "above_cap": "a run costs more than the cap of its population allows",
    "bad_argument": "`arguments` of an estimator are missing or do not fit",
    "bad_card": "`keys` of the data card are missing or do not fit",
    "bad_keys": "`keys` of params.yaml or of another file of settings are unknown, missing or do not fit",
    "bad_option": "`options` of a command are missing or do not fit",
    "bad_output": "there is something at the `path` to write to",
    "bad_published": "the file of published numbers does not have what a comparison needs",
    "bad_schema": "a `field` of a table schema says too little or contradicts another",
    "bad_variable": "a `variable` of the environment has a value that is not known",
    "broken_file": "a file of a run is damaged; restore it",
    "busy": "another process works on this",
    "card_broken": "a privacy card does not withstand its verification",
    "card_not_private": "a registry lists private deployments alone",
    "changed_params": "params.yaml was edited while a run began; begin again",
    "consent_needed": "a person has to agree, at a terminal or by `variable` or `options`",
    "encoder_unfit": "an encoder is another than the model was trained behind, or lacks what it needs",
    "evaluation_failed": "a settled run could not be evaluated; start it again",
    "files_of_two_runs": "files in artifacts are not of one run; bring back those that belong together",
    "form_unfit": "a model cannot be exported in this form",
    "library_missing": "an optional library has to be installed",
    "method_unfit": "a search cannot price this method",
    "missing_file": "there is no file at `path`",
    "model_unfit": "a model is not one of this estimator",
    "no_checkout": "the folder lies in no checkout",
    "no_plan": "the calibrate stage has to run first",
    "no_run": "there is no finished run",
    "no_server": "no Prefect server answers",
    "no_terminal": "there is nobody to ask; give the option",
    "no_trials": "a search drew no trial; its budget is spent",
    "no_worker": "no worker takes runs of the Prefect server",
    "not_prepared": "the prepare stage has to run again",
    "other_server": "another program answers where the Prefect server would",
    "other_software": "other software began the run",
    "process_killed": "a process was killed; start it again with fewer",
    "processes_differ": "the processes of a run do not agree in what `differing` names",
    "scores_differ": "an exported model gives other scores",
    "server_runs": "the Prefect server runs already",
    "stale_plan": "the plan was made for something else, which `differing` names; calibrate again",
    "target_unreachable": "no noise meets the target",
    "too_few_blocks": "no block is new or can pay, so nothing is trained",
    "trials_refused": "some trials of a comparison cannot run",
    "unlike_population": "the ledger has other terms for the population, which `differing` names",
    "unlike_training": "data are not as when the model was trained",
    "unreadable_file": "the file at `path` is not of the form that it should have",
}
"""Kinds of refusals that the pipeline and the estimators make, by code: what a caller may do something about.

A kind has many sentences, each of them where it is raised.
"""

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
