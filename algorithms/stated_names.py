"""Names as plans, cards and models state them; imports no torch."""

from pathlib import Path


def without_folders(name: str) -> str:
    """The name of a public model, or of a file, as plans, cards and models state it: no folder outside the project.

    Example:
        >>> without_folders("/home/ada/models/bert"), without_folders("prajjwal1/bert-mini")
        ('bert', 'prajjwal1/bert-mini')
    """
    path = Path(name)
    return path.name if path.is_absolute() or {"..", "~"} & {*path.parts} else name
