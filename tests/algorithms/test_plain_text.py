"""Texts of others stay texts, whatever shows them."""

import re

import pytest
from markdown_it import MarkdownIt

from algorithms.plain_text import for_csv, for_figure, for_markdown, for_terminal, from_csv, visible
from tests.support.hostile_texts import HOSTILE

RENDERER = MarkdownIt("commonmark", {"html": True}).enable("table")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_shown_has_no_character_that_hides_another(text: str) -> None:
    for shown in (visible(text), for_terminal(text), for_figure(text), for_csv(text), for_markdown(text)):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\ud800-\udfff]", shown)
        shown.encode()


@pytest.mark.parametrize(
    "text", [*HOSTILE, "2.5 or more", "-0.5", "a_b", "x* y*", "~~~", "## a ##", "5) x", "12."]
)
@pytest.mark.parametrize("line", ["{}", "- {}", "# {}", "| a |\n| --- |\n| {} |", "**{}**"])
def test_a_renderer_of_markdown_shows_the_text_and_nothing_else(text: str, line: str) -> None:
    page = rendered(line.format(for_markdown(text)))
    assert page == [*rendered(line.format("text"))[:-1], visible(text).strip()]


def rendered(page: str) -> list[str]:
    """The kinds of all elements of a page, then its last text."""
    blocks = RENDERER.parse(page)
    inline = [child for block in blocks for child in block.children or ()]
    texts = [child.content for child in inline if child.type == "text" and child.content]
    return [token.type for token in (*blocks, *inline) if token.content or token.type != "text"] + texts[-1:]


@pytest.mark.parametrize("text", [*HOSTILE, "'=1", "''=1", "'quoted'", "-1", "+2.5e-3", "=", "'-1"])
def test_no_cell_is_a_formula_and_each_comes_back(text: str) -> None:
    cell = for_csv(text)
    assert cell[:1] not in set("=+-@\t\r\n") or float(cell) == float(text)
    assert from_csv(cell) == visible(text)


def test_numbers_and_plain_names_stay_as_they_are() -> None:
    for text in ("-1", "+5", "-2.5e-3", "<=50K", ">50K", "a-b", "'t Hooft", "naïve", "日本", "😀", "0.1"):
        assert for_csv(text) == text == for_figure(text) == for_terminal(text)


def test_lines_stay_lines_at_a_terminal_and_become_one_elsewhere() -> None:
    assert for_terminal("a\n\tb\r") == "a\n\tb\\r"
    assert visible("a\nb") == "a\\nb"


def test_half_a_character_of_a_file_name_is_shown_as_its_code() -> None:
    assert visible(b"a\xff".decode(errors="surrogateescape")) == "a\\udcff"
