"""The command `epsilonflow`, also as `python -P -m epsilonflow`."""

import sys

from epsilonflow import find_shadowing


def refuse_shadowing() -> None:
    """End this process by a sentence and exit status 2 if a file is found in place of a package of ours."""
    if (shadowing := find_shadowing("flows", "tasks", "algorithms", "data")) is not None:
        sys.stderr.write(f"refused: {shadowing}\n")
        raise SystemExit(2)


def main() -> None:
    """Run the command."""
    refuse_shadowing()
    from flows.cli.main import app

    app()


if __name__ == "__main__":
    main()
