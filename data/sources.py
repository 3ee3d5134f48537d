"""What a data card may say about a population that grows block by block: where its blocks are."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints, field_validator

from data.columns import Strict, Word

Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Folder(Strict):
    """One file a block in a folder below the project root; the file's name up to its ending is the block's."""

    kind: Literal["folder"]
    path: Word

    @property
    def divides_by(self) -> str:
        """In words, what says of a record in which block it is."""
        return "the files of a folder"

    @field_validator("path")
    @classmethod
    def _is_below_the_root(cls, path: str) -> str:
        if path.startswith(("/", "~")) or ".." in path.split("/"):
            raise ValueError("path must be relative to the project root")
        return path


class Query(Strict):
    """The rows of a query, of which one column says the block.

    url_from: the environment variable with the SQLAlchemy URL, which never stands in a file. query: a SELECT.
    column: the query's column with the block's name; rows without one are in no block. names: the blocks that there
    are, also those without rows, where the names in the database are not to be published; rows of others are in none.
    """

    kind: Literal["sql"]
    url_from: Variable
    query: Annotated[str, StringConstraints(min_length=1)]
    column: Word
    names: tuple[Word, ...] = Field(default=(), exclude_if=lambda given: not given)

    @property
    def divides_by(self) -> str:
        """In words, what says of a record in which block it is."""
        return f"the column {self.column!r} of a query"


Source: TypeAlias = Annotated[Folder | Query, Field(discriminator="kind")]
