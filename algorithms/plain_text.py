"""Texts that others wrote, shown as text: a class, a file or a population may be named `$x$`, `[red]` or `<b>`.

A function for each kind of output. HTML is escaped by Jinja, which is given `visible` texts, and figures are drawn
without mathematics, see `tasks.reporting`.
"""

import re

_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # control characters: escape sequences of terminals begin with one
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of what follows
    r"\u2028\u2029\ud800-\udfff\ufeff]"  # end lines, halves of characters, a byte order mark
)
_FORMULA = re.compile(r"'*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_MARKDOWN = re.compile(r"[\\`*_{}\[\]#|~$]")
_ITEM = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+](?:[-\s]|$)))")


def visible(text: str, *, but: str = "") -> str:
    r"""Replace what is not seen, or hides what is seen, by its escape sequence; keep the characters in `but`.

    Example:
        >>> print(visible("a\x1b[2Jb\n"))
        a\x1b[2Jb\n
    """
    return _INVISIBLE.sub(lambda match: match[0] if match[0] in but else _escape(match[0]), text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def for_terminal(text: str) -> str:
    """A text of some lines for a terminal, which obeys escape sequences."""
    return visible(text, but="\n\t")


def for_figure(text: str, longest: int = 24) -> str:
    """A name in a figure, which a long one would leave no room for."""
    shown = visible(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def for_csv(text: str) -> str:
    """A cell of a CSV file. A spreadsheet computes what begins like a formula, and takes an apostrophe for text.

    Example:
        >>> for_csv("=1+1"), for_csv("-1"), for_csv("a=1")
        ("'=1+1", '-1', 'a=1')
    """
    shown = visible(text)
    is_formula = _FORMULA.match(shown) and not _NUMBER.fullmatch(shown)
    return f"'{shown}" if is_formula else shown


def from_csv(cell: str) -> str:
    """The text of a cell that `for_csv` made."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def for_markdown(text: str) -> str:
    r"""A text on one line of Markdown, also in a table's cell.

    Example:
        >>> print(for_markdown("[a](b) | <i>"))
        \[a\](b) \| &lt;i&gt;
    """
    plain = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ITEM.sub(r"\1\\", _MARKDOWN.sub(r"\\\g<0>", plain.strip()))
