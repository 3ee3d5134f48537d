"""Pages from templates: what a run's report and a comparison's page have in common, their style included."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_SHARED = Path(__file__).parent


def environment(*, below: Path = _SHARED, autoescape: bool = True) -> Environment:
    """Templates of the folder `below`, and of this one; the filter `source` has a PNG picture as an image's source."""
    made = Environment(
        loader=FileSystemLoader([below, _SHARED]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["source"] = _source
    return made


def _source(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
