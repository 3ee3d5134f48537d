"""python -m tests.soak.image: the steps of the Dockerfile in a clean Debian root, where no Docker is at hand.

As root: debootstrap makes the Debian of the image that FROM names, each instruction is carried out in it, and then the
image's user makes a project in a mounted folder and runs it. It needs a network, debootstrap and 5 GB. What differs
from the image: Python is Debian's of the same version; with --own-torch, PyTorch is copied from the environment that
runs this, for a machine that does not reach its index.
"""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import typer

_SYSTEM = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
_FROM = re.compile(r"python:(?P<python>[\d.]+)-slim-(?P<suite>\w+)")
_TORCH = ("torch", "torchvision")


@dataclass
class Root:
    """A folder that becomes the image's file system."""

    folder: Path
    source: Path
    own_torch: bool
    user: str = "0"
    here: str = "/"
    variables: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_BREAK_SYSTEM_PACKAGES": "1",  # Debian's Python belongs to its packages, the image's does not
            "PIP_ROOT_USER_ACTION": "ignore",
        }
    )
    arguments: dict[str, str] = field(default_factory=dict)

    def carry_out(self, name: str, rest: str) -> None:
        """One instruction; raises NotImplementedError for one that the Dockerfile did not have."""
        match name:
            case "FROM":
                self._debian(re.sub(r"\$\{(\w+)\}", lambda named: self.arguments[named[1]], rest))
            case "RUN":
                self.run(rest)
            case "COPY":
                *sources, target = shlex.split(rest)
                for source in sources:
                    self._copy(self.source / source, target)
            case "WORKDIR":
                self.here = rest
                (self.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ARG":
                name, is_set, value = rest.partition("=")
                self.arguments |= {name: value} if is_set else {}
            case "ENV":
                self.variables |= dict(word.split("=", 1) for word in shlex.split(rest))
            case "USER":
                self.user = rest
            case "ENTRYPOINT" | "CMD":
                pass
            case _:
                raise NotImplementedError(f"{name} {rest}")

    def run(self, command: str) -> None:
        """A command of the user's shell; raises CalledProcessError."""
        known = [f"{key}={value}" for key, value in (self.arguments | self.variables).items()]
        inside = ["chroot", f"--userspec={self.user}", str(self.folder), "env", "-i", *known]
        subprocess.run([*inside, "sh", "-c", f"cd {shlex.quote(self.here)} && {command}"], check=True)

    def _debian(self, image: str) -> None:
        named = _FROM.fullmatch(image)
        if named is None:
            raise NotImplementedError(image)
        command = ["debootstrap", "--variant=minbase", f"--include={_SYSTEM}", named["suite"]]
        if not (self.folder / "usr/bin/python").exists():
            subprocess.run([*command, str(self.folder)], check=True)
        for path in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
            shutil.copy(f"/{path}", self.folder / path)
        for kind, target in (("proc", "proc"), ("devtmpfs", "dev")):
            subprocess.run(["mount", "-t", kind, kind, str(self.folder / target)], check=True)
        self.run(f"python --version | grep -F 'Python {named['python']}.'")
        for package in _TORCH if self.own_torch else ():
            for file in distribution(package).files or ():
                copied = self.folder / "usr/local/lib/python3.11/dist-packages" / file
                if ".." not in file.parts and not copied.exists():
                    copied.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file.locate(), copied)

    def _copy(self, source: Path, target: str) -> None:
        there = self.folder / self.here.lstrip("/") / target
        if source.is_dir():
            shutil.copytree(source, there, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, there)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Of a Dockerfile, with lines that go on joined."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, rest = line.split(maxsplit=1)
        yield name, rest


def _mount(root: Root) -> None:
    """A folder of the user's, with a made-up table, where a checkout is to be."""
    checkout, draw = root.folder / root.here.lstrip("/"), random.Random(0)
    rows = [(draw.randrange(100), draw.randrange(100)) for _ in range(400)]
    lines = [f"{age},{weight},{'yes' if age > weight else 'no'}" for age, weight in rows]
    (checkout / "table.csv").write_text("\n".join(["age,weight,answer", *lines]) + "\n")
    number = {"type": "integer", "constraints": {"minimum": 0, "maximum": 100}}
    answer = {"type": "string", "constraints": {"enum": ["no", "yes"]}}
    kinds = {"age": number, "weight": number, "answer": answer}
    schema = {"fields": [{"name": name, **kind} for name, kind in kinds.items()]}
    (checkout / "schema.json").write_text(json.dumps(schema))
    os.chown(checkout, int(root.user), int(root.user))


def main(
    folder: Annotated[Path | None, typer.Option(help="For the root; kept.")] = None,
    own_torch: Annotated[
        bool, typer.Option("--own-torch", help="Copy PyTorch from this environment.")
    ] = False,
) -> None:
    """Build the root, make a project in it and run that; exit status 1 where a step fails."""
    if os.geteuid() or shutil.which("debootstrap") is None:
        raise typer.BadParameter("a clean Debian root needs root and debootstrap")
    source = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="image-", ignore_cleanup_errors=True) as fresh:
        root = Root((folder or Path(fresh)).resolve(), source, own_torch)
        root.folder.mkdir(parents=True, exist_ok=True)
        root.folder.chmod(0o755)  # the image's user is to see what is in it
        if own_torch:
            root.variables["PIP_RETRIES"] = (
                "0"  # PyTorch's index is out of reach, and pip asks it for every package
            )
        try:
            for name, rest in instructions((source / "Dockerfile").read_text(encoding="utf-8")):
                typer.echo(f"--- {name} {rest}")
                root.carry_out(name, rest)
            _mount(root)
            root.variables |= {"HOME": str(Path(root.variables["EPSILONFLOW_HOME"]).parent)}
            for command in (
                "epsilonflow --help",
                "epsilonflow init project --from schema.json --file table.csv --label answer --at-most 1000",
                "cd project && epsilonflow run",
                "cd project && epsilonflow card verify",
                'test "$(stat -c %u "$EPSILONFLOW_HOME/ledger.sqlite")" = "$(id -u)" && test "$(id -u)" != 0',
            ):
                typer.echo(f"--- as user {root.user}: {command}")
                root.run(command)
        except subprocess.CalledProcessError as failed:
            sys.stderr.write(f"ended with {failed.returncode}\n")
            raise typer.Exit(1) from None
        finally:
            for target in ("proc", "dev"):
                subprocess.run(["umount", "--lazy", str(root.folder / target)], check=False)


if __name__ == "__main__":
    typer.run(main)
