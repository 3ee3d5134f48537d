"""The checkout of the scheduler's scenarios: a clone of the last commit with the example of weekly visits."""

import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from tasks.config.overrides import ParamOverrides, params_edit

_CARD = Path("examples/retraining/visits-weekly.yaml")
_SETTINGS = {
    "algorithm.sampling_rate": 0.25,
    "algorithm.steps": 20,
    "performance.checkpoint_seconds": 0.2,
    "privacy.accountant": "rdp",
}


def clone(source: Path, root: Path) -> None:
    """Makes the checkout, with a commit `before` anything was trained."""
    run = subprocess.run
    run(["git", "clone", "--quiet", str(source), str(root)], check=True)
    for name, value in (("user.name", "Benchmark"), ("user.email", "benchmark@example.org")):
        run(["git", "config", name, value], cwd=root, check=True)
    run(["git", "checkout", "--quiet", "-B", "main"], cwd=root, check=True)
    (root / "data/cards" / _CARD.name).write_text((source / _CARD).read_text())
    run([sys.executable, "examples/retraining/make_weeks.py"], cwd=root, check=True)
    asked = ParamOverrides(
        dataset="visits-weekly", algorithm="dp_sgd", epsilon=1.0, delta=1e-5, settings=_SETTINGS
    )
    params_edit(root, asked).write()
    run(["git", "add", "--all"], cwd=root, check=True)
    run(["git", "commit", "--quiet", "--message", "weekly visits"], cwd=root, check=True)
    run(["git", "tag", "before"], cwd=root, check=True)


def retraining_file(root: Path, name: str) -> None:
    """Writes NAME.yaml: the example's settings under a name of its own, so that its period is due."""
    yaml = YAML(typ="safe", pure=True)
    settings = yaml.load(root / "examples/retraining/retrain.yaml")
    del settings["recipe"]  # it is that of params.yaml, where `set_steps` writes
    settings |= {"name": name, "minimal_gain": -1.0, "spread": {"policy": "equal", "planned": 16}}
    yaml.dump(settings, root / f"{name}.yaml")


def set_steps(root: Path, steps: int) -> None:
    """How long training takes from now on."""
    params_edit(root, ParamOverrides(settings={"algorithm.steps": steps})).write()


def set_seed(root: Path, seed: int) -> None:
    """Another start of the model, so another training."""
    params_edit(root, ParamOverrides(seed=seed)).write()
