"""What an algorithm may know about a data set: nothing but what its card declares."""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from data.card import DataCard
from data.errors import DataRefused


@dataclass(frozen=True)
class PublicDescription:
    """The public facts of a prepared data set.

    public: whether the records themselves are public. unit: what one record is, the unit of privacy.
    population: whose budget is charged. cap_epsilon, cap_delta: the cap of that budget when it is first seen.
    records, test_records: how many to train and to test on, or None when the number is private.
    input_shape: of one record's features.
    holdout: whom the test metrics protect; "public" means that the test records are declared public.
    """

    dataset: str
    title: str
    source: str
    licence: str
    public: bool
    unit: str
    population: str
    cap_epsilon: float
    cap_delta: float
    records: int | None
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    test_records: int | None
    holdout: Literal["public"]

    def to_json(self) -> str:
        """The description as JSON text; a function of the card alone."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> "PublicDescription":
        """The description that `to_json` wrote; raises DataRefused when it is none."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError:
            raise DataRefused(
                "The description of the prepared data is damaged; run the prepare stage again."
            ) from None


_ADAPTER = TypeAdapter(PublicDescription)


def public_description(card: DataCard) -> PublicDescription:
    """The public facts that `card` declares."""
    return PublicDescription(
        dataset=card.name,
        title=card.title,
        source=card.source,
        licence=card.licence,
        public=card.public,
        unit=card.unit,
        population=card.population,
        cap_epsilon=card.cap.epsilon,
        cap_delta=card.cap.delta,
        records=card.records.train,
        input_shape=card.input_shape,
        classes=card.classes,
        test_records=card.records.test,
        holdout=card.holdout,
    )
