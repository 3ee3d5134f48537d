"""The command `epsilonflow doctor`: check this machine and checkout, and print a sentence for each check."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_FREE_GB = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of one check. is_well: None if something optional is missing."""

    name: str
    is_well: bool | None
    text: str


def findings(root: Path) -> Iterator[Finding]:
    """Check everything, including the checkout at `root` if there is one; changes and spends nothing."""
    looks: tuple[tuple[str, Callable[[Path], tuple[bool | None, str]]], ...] = (
        ("Python", _python),
        ("torch", _torch),
        ("checkout", _checkout),
        ("data folder", _home),
        ("ledger", _ledger),
        ("owner key", _owner_key),
        ("DVC", _dvc),
        ("Prefect", _prefect),
        ("Weights & Biases", _wandb),
        ("mirror", _mirror),
        ("disk", _disk),
        ("extras", _extras),
    )
    for name, look in looks:
        try:
            is_well, text = look(root)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            is_well, text = False, " ".join(str(error).split())
        yield Finding(name, is_well, text)


def _python(_root: Path) -> tuple[bool, str]:
    ours = ".".join(map(str, sys.version_info[:3]))
    where = "Windows, which is supported only in WSL" if sys.platform == "win32" else sys.platform
    is_well = sys.version_info >= (3, 11) and sys.platform != "win32"
    return is_well, f"{ours} on {where} (3.11 or newer is needed)"


def _torch(_root: Path) -> tuple[bool, str]:
    import torch

    found = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if found else "no usable GPU, so runs use the CPU"
    return True, f"{torch.__version__}, {device}"


def _checkout(root: Path) -> tuple[bool, str]:
    missing = [name for name in ("params.yaml", "dvc.yaml", ".dvc", ".git") if not (root / name).exists()]
    if missing:
        return (
            False,
            f"{root} has no {', '.join(missing)}; change to a checkout, or run `epsilonflow init DIR`",
        )
    from tasks.config import params

    params.load(root / "params.yaml", reads=params.GROUPS)
    return True, "params.yaml is valid"


def _home(_root: Path) -> tuple[bool, str]:
    from tasks.config import home

    folder = home()
    return True, f"{folder}{'' if folder.exists() else ' (the first run creates it)'}"


def _ledger(root: Path) -> tuple[bool | None, str]:
    if not (root / "params.yaml").exists():
        from sqlalchemy import make_url

        from tasks.config import ledger_url

        place = make_url(ledger_url(None)).render_as_string(hide_password=True)
        return None, f"{place}; run this in a checkout to verify it"
    from tasks.runs.ledger import open_ledger

    ledger = open_ledger(root)
    ledger.verify()
    rows, populations = len(ledger.history()), len(ledger.populations())
    some = f"{populations} population{'' if populations == 1 else 's'}"
    return True, f"the hash chain of {rows} rows is intact; {some}"


def _owner_key(_root: Path) -> tuple[bool | None, str]:
    from data.files import OWNER_KEY, OWNER_PUB
    from tasks.config import home

    path = home() / OWNER_KEY
    if not path.exists() and (home() / OWNER_PUB).exists():
        return False, f"{path} is gone; restore it from a copy"
    if not path.exists():
        return None, "none yet; the first private run creates it. Then keep a copy in a safe place"
    others = path.stat().st_mode & 0o077
    return not others, f"{path}{' can be read by other users; run chmod 600 on it' if others else ''}"


def _dvc(root: Path) -> tuple[bool, str]:
    inside = (root / ".dvc").is_dir()
    return inside, f"{version('dvc')}{'' if inside else ', but this folder has no .dvc'}"


def _prefect(root: Path) -> tuple[bool | None, str]:
    from flows.cli.steps import has_prefect_api

    if not has_prefect_api():
        start = "prefect server start --background"
        return None, f"{version('prefect')}, without a server, which runs do not need; `{start}` starts one"
    return True, f"{version('prefect')}, with a server, which shows all runs"


def _wandb(root: Path) -> tuple[bool | None, str]:
    from tasks.config import params

    if not (root / "params.yaml").exists():
        return None, version("wandb")
    mode = params.load(root / "params.yaml", reads=("tracking",)).tracking.mode
    netrc = Path.home() / ".netrc"
    known = "WANDB_API_KEY" in os.environ or (
        netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8")
    )
    if mode == "online" and not known:
        return False, "tracking.mode is online, but you are not logged in: `wandb login`"
    return True, f"{version('wandb')}, tracking.mode is {mode}"


def _mirror(_root: Path) -> tuple[bool | None, str]:
    from tasks.config import data_mirror

    mirror = data_mirror()
    if mirror is None:
        return None, "none, so data sets are downloaded"
    return mirror.is_dir(), f"{mirror}{'' if mirror.is_dir() else ', which is not a folder'}"


def _disk(root: Path) -> tuple[bool, str]:
    free = shutil.disk_usage(root).free / 1e9
    return free > _FREE_GB, f"{free:.0f} GB free; at least {_FREE_GB:.0f} are recommended"


def _extras(_root: Path) -> tuple[bool | None, str]:
    packages = {"postgres": "psycopg", "dask": "prefect_dask", "ray": "prefect_ray", "models": "timm"}
    packages |= {"encoders": "wordllama", "export": "onnxruntime", "docs": "mkdocs"}
    there = [extra for extra, package in packages.items() if find_spec(package)]
    try:
        version("epsilonflow")
    except PackageNotFoundError:
        return False, "epsilonflow itself is not installed; run `make run` or `pip install -e .`"
    absent = ", ".join(sorted(packages.keys() - there)) or "none"
    return True if there else None, f"{', '.join(there) or 'none'}; not installed: {absent}"
