"""Names that mean something to what shows them: no output may take one for markup."""

HOSTILE = (
    "$\\frac{$",
    "<$50% and >$20",
    "[red]hot[/red] [/]",
    "\x1b[2J\x1b]0;owned\x07gone",
    "\u202egnp.exe",
    "<img src=x onerror=alert(1)>",
    "'\"><script>alert(1)</script>",
    '=HYPERLINK("http://evil";"x")',
    "+1+cmd|' /C calc'!A0",
    "@SUM(1)",
    "| a | b |",
    "`code` **bold** [link](javascript:alert(1))",
    "# title",
    "- item",
    "1. item",
    "---",
    "_hidden",
    "{{ 7 * 7 }}{% if %}",
    ":boom: \\n",
    "a\rb\x00c\u2028d",
    "&lt;b&gt;",
    "W" * 3000,  # longer than any figure is wide
)
