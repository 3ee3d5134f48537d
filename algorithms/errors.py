"""Errors of the privacy layer: refusals, raised before anything is spent, and failures after a charge.

A refusal whose sentence depends on who asked is data: a code, values, and a template of its sentence. Each front end
(the pipeline, `fit`, the estimators) has `Words` in one file of its own, which say what it calls a setting and how it
words what only it can remedy.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Words:
    """What a front end calls settings and remedies, and its own sentences.

    Attributes:
        prefixes: What it writes before the names of a group of settings, such as "algorithm." for "method".
        names: What it writes for a setting or remedy as a whole, such as "the number of steps" for "method.steps".
        sentences: Templates by code, in place of the raiser's.

    Example:
        >>> words = Words({"method": "method."}, {"target.delta": "the delta"})
        >>> template = "{asked} is too large; lower {method.clip_norm} or {target.delta}."
        >>> words.sentence(RefusedError(template, code="too_large", asked=3))
        '3 is too large; lower method.clip_norm or the delta.'
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)

    def sentence(self, error: "WordedError") -> str:
        """The error's message in these words."""
        if not error.code:
            return error.template
        template = self.sentences.get(error.code, error.template)
        return _Slots(self).vformat(template, (), error.fields)

    def name(self, slot: str) -> str:
        """What these words call a setting or a remedy, such as "method.clip_norm"."""
        group, _, path = slot.partition(".")
        name = self.names.get(slot) or PLAIN.names.get(slot)
        return name or self.prefixes.get(group, "") + path

    @contextmanager
    def wording_errors(self) -> Iterator[None]:
        """Errors that leave the block speak these words from then on."""
        try:
            yield
        except WordedError as error:
            error.words = self
            raise


class Slot(str):
    """A setting or a remedy as a field, for a template that does not know which one it is."""

    __slots__ = ()


class _Slots(string.Formatter):
    """Fills the slots of a template: `{group.name}` by a front end's words, others by the error's fields."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, object]) -> Any:
        """The value of a slot, and the key that it was found by."""
        value = Slot(field_name) if "." in field_name else kwargs[field_name]
        return self._words.name(value) if isinstance(value, Slot) else value, field_name


PLAIN = Words(
    names={
        "method.kind": "the method",
        "learned.kind": "the kind of learned features",
        "population.cap": "the cap of the population",
        "population.composition": "the composition of the population",
        "population.raise_cap": "raises the cap",
        "plan.remedy": "calibrate again",
        "run.remedy": "run again",
        "run.steps": "the whole run",
    }
)
"""Settings by their names in Python: the words of an error that no front end has caught."""


class WordedError(Exception):
    """An error whose sentence may depend on who meets it.

    Attributes:
        template: The message as it is, where there is no code; otherwise with a slot `{name}` for each field, and
            `{group.name}` for a setting or a remedy that each front end words by itself.
        code: What is wrong, for front ends and tests; empty where all front ends have the same sentence.
        fields: The values in the sentence.
        words: In which the message is.
    """

    def __init__(self, template: str, /, *, code: str = "", **fields: object) -> None:
        super().__init__(template)
        self.template, self.code, self.fields, self.words = template, code, fields, PLAIN

    def __str__(self) -> str:
        return self.words.sentence(self)


class RefusedError(WordedError, ValueError):
    """A request that cannot be honoured; the message says what was asked, what is allowed and what to do."""


class BudgetRefusedError(RefusedError):
    """The budget of a run or of a population does not cover the request."""


class NoiseElsewhereError(RefusedError):
    """A run that another home has reserved, which has the key of its noise."""


class LedgerBrokenError(RefusedError):
    """The ledger's hash chain does not hold: a row was changed, removed or inserted outside the ledger."""


class ModelRefusedError(RefusedError):
    """A model or encoder that is not available, does not fit the data or cannot be trained privately."""


class QueryFailedError(WordedError, RuntimeError):
    """A query that failed after it was charged; the message contains nothing about the records."""


class EmptySearchError(WordedError, RuntimeError):
    """A search that was charged and drew no trial, so that there is no result."""
