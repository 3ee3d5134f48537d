"""What a data card leaves open about whose the rows are; asked of the card and of a file's header, never of rows."""

import re
from collections.abc import Iterable

from data.card import DataCard
from data.formats import Binned, Hashed, Ignored, Numeric, Table

_PEOPLE = (
    "person|people|individual|adult|child|children|man|men|woman|women|patient|user|customer|client|member|subject"
    "|participant|employee|student|pupil|citizen|respondent|resident|donor|driver|visitor|passenger|subscriber|applicant"
)
_KEYS = {
    "id",
    "ids",
    "uid",
    "uuid",
    "guid",
    "pid",
    "ssn",
    "mrn",
    "email",
    "mail",
    "phone",
    "passport",
    "username",
}


def are_people(unit: str) -> bool:
    """Whether the unit of privacy, such as "one patient", is a person."""
    return bool(re.search(rf"\b({_PEOPLE})s?\b", unit.lower()))


def is_like_an_id(name: str, *, is_feature: bool = False) -> bool:
    """Whether a column is named like what tells people apart.

    is_feature: whether a model learns from it, so that `clients` may say how many there are.

    Example:
        >>> [name for name in ("patient_id", "userId", "CustomerNo", "width", "paid") if is_like_an_id(name)]
        ['patient_id', 'userId', 'CustomerNo']
    """
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    optional = "" if is_feature else "?"
    return not _KEYS.isdisjoint(words) or bool(
        re.fullmatch(rf"({_PEOPLE})s?(ids?|uids?|no|nr|num|number|key|code|name){optional}", "".join(words))
    )


def questions_about(card: DataCard, header: Iterable[str] = ()) -> list[str]:
    """Ask why held-out records of a private data set are public, and whose several rows may be.

    A person may have several rows where a column is named like a person's id: one that nothing uses, or a number or a
    hashed text of which a feature is made. header: names of the file's columns, where the card need not list them all.
    """
    return [*_about_held_out(card), *_about_people(card, header)]


def _about_held_out(card: DataCard) -> list[str]:
    if card.public or card.holdout == "private" or card.holdout_why is not None:
        return []
    return [
        "why are the held-out records public? Exact metrics of them leave, so these people are not protected; say it in"
        " the data card by `holdout_why: one sentence`, or `holdout: private` in the card of a new population"
    ]


def _about_people(card: DataCard, header: Iterable[str] = ()) -> list[str]:
    if card.person is not None or not are_people(card.unit):
        return []
    unused, features = dict.fromkeys(header), list[str]()
    if isinstance(card.reader, Table):
        ignored = [column.name for column in card.reader.columns if isinstance(column, Ignored)]
        listed = {column.name for column in card.reader.columns}
        all_unused = dict.fromkeys([*ignored, *(name for name in unused if name not in listed)])
        unused = {name: None for name in all_unused if name not in card.reader.content}
        features = [c.name for c in card.reader.columns if isinstance(c, Numeric | Binned | Hashed)]
    return [
        *(
            f"may a person have several rows? The column {name!r} is named like an id and is ignored, and the unit is"
            f" {card.unit!r}; if so, declare `person: {{column: {name}, per_person: K}}` in the data card, for without"
            " it each row is protected by itself"
            for name in unused
            if is_like_an_id(name)
        ),
        *(
            f"is the column {name!r} a person's id? A model learns nothing of it for other people; if it is one, make"
            " it `kind: ignored` in the data card, and if a person may have several rows, declare"
            f" `person: {{column: {name}, per_person: K}}`, for without it each row is protected by itself"
            for name in features
            if is_like_an_id(name, is_feature=True)
        ),
    ]
