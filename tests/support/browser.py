"""A page as Chromium shows it, where that is installed: what overflows, what is hard to read, what it complains of."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import HANG_SECONDS

_LOOK = """
<script>
const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b; };
const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const under = (one) => { for (; one; one = one.parentElement) { const c = parts(getComputedStyle(one).backgroundColor);
  if (c.length === 3 || c[3] > .99) return c.slice(0, 3); } return [255, 255, 255]; };
const found = { wide: document.documentElement.scrollWidth - innerWidth, faint: [], small: [], texts: 0, scrolled: 0,
  tall: 0 };
for (const one of document.querySelectorAll('.scroll')) found.scrolled += one.scrollWidth > one.clientWidth;
for (const one of document.querySelectorAll('tr')) found.tall = Math.max(found.tall, one.offsetHeight);
for (const one of document.querySelectorAll('body *')) {
  const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || one.tagName === 'SCRIPT' || !one.getClientRects().length) continue;
  const style = getComputedStyle(one), size = parseFloat(style.fontSize);
  const [high, low] = [light(parts(style.color).slice(0, 3)), light(under(one))].sort((a, b) => b - a);
  const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
  found.texts += 1;
  if (size < 11) found.small.push(one.textContent.trim().slice(0, 40));
  if ((high + .05) / (low + .05) < needed) found.faint.push(one.textContent.trim().slice(0, 40));
}
found.window = innerWidth;
parent.document.body.setAttribute('data-found', JSON.stringify(found));
</script>
"""


@dataclass(frozen=True)
class Seen:
    """wide: pixels by which the page is wider than the window. faint: texts below the contrast of WCAG AA.

    small: texts below 11 pixels. texts: how many were looked at. complaints: what the console says.
    scrolled: tables that have to be scrolled. tall: pixels of the highest row of a table.
    """

    wide: int
    faint: list[str]
    small: list[str]
    texts: int
    complaints: list[str]
    scrolled: int
    tall: int


def seen(page: str, folder: Path, *, width: int, dark: bool = False) -> Seen:
    """The page in a window of a width; skips the test where there is no Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    file = folder / "page.html"
    # it allows no script, also ours
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    inner = html.escape(open_page.replace("</body>", f"{_LOOK}</body>"))
    frame = f'<iframe srcdoc="{inner}" style="width: {width}px; height: 900px; border: 0"></iframe>'
    # a window is never below 500 pixels
    file.write_text(f"<!doctype html><body>{frame}</body>", encoding="utf-8")
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
    ]
    command += ["--hide-scrollbars", "--enable-logging=stderr", "--window-size=1300,1000", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    looked = json.loads(html.unescape(found[1]))
    assert looked["window"] == width
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(
        looked["wide"],
        looked["faint"],
        looked["small"],
        looked["texts"],
        complaints,
        looked["scrolled"],
        looked["tall"],
    )
