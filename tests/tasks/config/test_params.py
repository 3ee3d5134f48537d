"""params.yaml is checked whole, each value by the path of its key; the ledger is outside every checkout."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms.errors import RefusedError
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.ledger import Ledger
from tasks import config as environment
from tasks.config import params
from tasks.config.params import GROUPS, ModelParams, ParamsRefusedError, load, parse
from tests.support.changed import changed
from tests.support.checkout import PROJECT
from tests.support.refusals import contradicting, names_in, refused, refused_as

PARAMS = PROJECT / "params.yaml"


def document() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(PARAMS)
    return found


def with_value(key: str, value: object) -> dict[str, Any]:
    return dict(changed(document(), key, value))


def test_the_projects_own_file_is_valid() -> None:
    read = load(PARAMS, reads=GROUPS)
    assert (read.data.dataset, read.privacy.epsilon, read.privacy.delta) == ("digits", 3.0, 1e-5)
    assert isinstance(read.algorithm, DPSGD)
    assert read.algorithm_settings["steps"] == read.algorithm.steps


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy.epsilon", 0.0),
        ("privacy.epsilon", -1.0),
        ("privacy.epsilon", float("inf")),
        ("privacy.epsilon", float("nan")),
        ("privacy.epsilon", "3"),
        ("privacy.epsilon", True),
        ("privacy.epsilon", None),
        ("privacy.delta", -0.1),
        ("privacy.delta", 1.0),
        ("privacy.accountant", "gdp"),
        ("privacy.noise", "none"),
        ("privacy.count_noise", 0),
        ("data.dataset", ""),
        ("data.dataset", 3),
        ("data.transform", "wavelets"),
        ("model.seed", -1),
        ("model.seed", 1.5),
        ("model.name", None),
        ("performance.device", 0),
        ("performance.device", ""),
        ("performance.memory_mb", 0),
        ("performance.threads", 0),
        ("performance.checkpoint_seconds", -1.0),
        ("tracking.mode", "on"),
        ("algorithm.steps", 0),
        ("algorithm.steps", "many"),
        ("algorithm.expected_batch_size", 2.5),
        ("algorithm.clip_norm", -1.0),
        ("algorithm.clipping", "l3"),
        ("algorithm.update.momentum", 1.0),
        ("algorithm.update.schedule", "warmup"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_path(key: str, value: object) -> None:
    with refused_as("bad_keys", ParamsRefusedError) as refusal:
        parse(with_value(key, value))
    assert any(key.startswith(named) or named.startswith(key) for named in names_in(refusal, "keys"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy.evaluation", None),
        ("privacy.target", 3),
        ("model.settings", []),
        ("algorithm.update", "adam"),
    ],
)
def test_what_is_no_group_of_keys_is_refused_by_its_path(key: str, value: object) -> None:
    with refused_as("bad_keys", ParamsRefusedError, keys=(key,)):
        parse(with_value(key, value))


@pytest.mark.parametrize("shards", ["shard_frozen", "shard_trained"])
def test_parameters_lie_in_main_memory_or_in_shards(shards: str) -> None:
    places = tuple(f"performance.{key}" for key in ("offload", "shard_frozen", "shard_trained"))
    with refused_as("bad_keys", ParamsRefusedError, keys=places):
        parse({"performance": {"offload": True, shards: True}}, reads=("performance",))


def test_a_setting_of_a_librarys_model_is_given_once() -> None:
    own = {"name": "huggingface", "checkpoint": "bert", "settings": {"replace_batch_norm": True}}
    assert ModelParams.model_validate(own).all_settings == {"replace_batch_norm": True, "checkpoint": "bert"}
    with contradicting("checkpoint", "settings.checkpoint"):
        ModelParams.model_validate(own | {"settings": {"checkpoint": "bert"}})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "algorithm.clipnorm",
            "algorithm.clipnorm, perhaps clip_norm; the keys of algorithm for dp_sgd are name, steps,",
        ),
        (
            "algorithm.update.lr",
            "algorithm.update.lr; the keys of algorithm.update for dp_sgd are learning_rate, schedule,",
        ),
        ("ledger.cap", "ledger.cap"),
        ("privacy.epsilom", "privacy.epsilom, perhaps epsilon; the keys of privacy are epsilon, target,"),
    ],
)
def test_an_unknown_key_is_told_beside_those_that_there_are(key: str, said: str) -> None:
    with refused_as("bad_keys", ParamsRefusedError, keys=(key,)) as refusal:
        parse(with_value(key, 1.0))
    assert said in str(refusal.value)


def test_keys_that_there_are_are_listed_once() -> None:
    with refused_as("bad_keys", ParamsRefusedError, keys=("privacy.one", "privacy.two")) as refusal:
        parse(document() | {"privacy": document()["privacy"] | {"one": 1, "two": 2}})
    assert str(refusal.value).count("the keys of") == 1


def test_an_unknown_group_is_refused_even_by_a_stage_that_reads_another() -> None:
    with refused_as("bad_keys", ParamsRefusedError, unknown="privcy", keys=("privcy",)):
        parse(document() | {"privcy": {"epsilon": 1.0}}, reads=("data",))


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with refused_as("name_unknown", what="algorithm", name="dp_magic") as refusal:
        parse(with_value("algorithm.name", "dp_magic"))
    assert {"dp_sgd", "non_private"} <= {*str(refusal.value.fields["choices"]).split(", ")}


def test_groups_without_effect_on_results_alone_may_be_missing() -> None:
    rest = {name: values for name, values in document().items() if name not in params.OPTIONAL}
    assert parse(rest).performance == params.Performance()
    for group in ("data", "privacy", "model", "algorithm"):
        with refused_as("bad_keys", ParamsRefusedError, keys=(group,), problem="is missing"):
            parse({name: values for name, values in document().items() if name != group})


def test_only_the_groups_of_a_stage_are_checked_and_can_be_read() -> None:
    read = parse(with_value("privacy.epsilon", -1.0), reads=("data",))
    assert read.data.dataset == "digits"
    with pytest.raises(LookupError, match=r"privacy.*READS"):
        _ = read.privacy


@pytest.mark.parametrize(
    "text", ["privacy: {epsilon: 1, epsilon: 100}", "privacy: [", "just words", "- a list", "\x00", ""]
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with refused(r"params\.yaml", ParamsRefusedError):
        load(tmp_path / "params.yaml", reads=("privacy",))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refused_as("missing_file", ParamsRefusedError):
        load(tmp_path / "params.yaml", reads=())


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hunter2@host/ledger",
        "postgresql://host/ledger?password=hunter2",
        "postgresql://host/ledger?user=me&sslpassword=hunter2",
    ],
)
def test_a_password_in_the_file_is_refused_and_not_repeated(url: str) -> None:
    with refused_as("bad_keys", ParamsRefusedError, keys=("ledger.url",)) as refusal:
        parse(with_value("ledger.url", url))
    assert "hunter2" not in str(refusal.value)


def test_a_url_without_a_password_is_taken() -> None:
    assert parse(with_value("ledger.url", "postgresql://me@host:5432/ledger")).ledger.url is not None


def test_the_ledger_lies_in_the_home(own_home: Path) -> None:
    assert environment.ledger_url(None) == f"sqlite:///{own_home}/ledger.sqlite"


def test_a_home_that_no_url_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SQLite would open the file `really`."""
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/really?/home")
    with pytest.raises(RefusedError, match="question mark"):
        environment.ledger_url(None)
    with pytest.raises(RefusedError, match="sqlite:///PATH"):
        Ledger.open(f"sqlite:///{tmp_path}/really?/home/ledger.sqlite")
    assert not (tmp_path / "really").exists()


def test_the_home_is_absolute_and_outside_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPSILONFLOW_HOME")
    assert environment.home().is_absolute()
    assert Path.cwd() not in environment.home().parents


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSILONFLOW_LEDGER_URL", "sqlite:////srv/one.sqlite")
    assert environment.ledger_url("sqlite:////srv/other.sqlite") == "sqlite:////srv/one.sqlite"


def test_a_relative_place_is_refused_since_each_copy_would_have_its_own_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for url in ("sqlite:///ledger.sqlite", "sqlite+pysqlite:///data/ledger.sqlite"):
        with refused_as("relative_ledger", url=url):
            environment.ledger_url(url)
    for place in (".epsilonflow", "../budget"):
        monkeypatch.setenv("EPSILONFLOW_HOME", place)
        with refused_as("relative_home", folder=Path(place)):
            environment.home()


def test_no_budget_is_kept_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".dvc").mkdir(parents=True)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path / "project" / "deep" / "home"))
    checkout = tmp_path / "project"
    with refused_as("within_checkout", what="EPSILONFLOW_HOME", folder=checkout):
        environment.home()
    with refused_as("within_checkout", folder=checkout):
        environment.ledger_url(f"sqlite:///{tmp_path}/project/ledger.sqlite?timeout=3")
    assert (
        environment.ledger_url(f"sqlite:///{tmp_path}/ledger.sqlite") == f"sqlite:///{tmp_path}/ledger.sqlite"
    )


@pytest.mark.parametrize("text", ["", "~/data"])
def test_the_mirror_is_a_folder_or_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EPSILONFLOW_DATA_MIRROR", text)
    assert environment.data_mirror() == (Path.home() / "data" if text else None)


def test_what_counts_is_where_a_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".dvc").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/project/../home")
    assert environment.ledger_url(None) == f"sqlite:///{tmp_path}/project/../home/ledger.sqlite"
    monkeypatch.setenv("EPSILONFLOW_HOME", f"{tmp_path}/link/home")
    checkout = tmp_path / "project"
    with refused_as("within_checkout", what="EPSILONFLOW_HOME", folder=checkout):
        environment.home()
    with refused_as("within_checkout", folder=checkout):
        environment.ledger_url(f"sqlite:///{tmp_path}/link/ledger.sqlite")


@pytest.mark.parametrize(
    ("home", "said"),
    [("file", "cannot be made one"), ("file/deeper", "cannot be made one"), (None, "a relative path")],
)
def test_a_home_that_cannot_be_is_refused(
    home: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPSILONFLOW_HOME", "~no-such-user/x" if home is None else str(tmp_path / home))
    with refused(f"{said}.*; .*[.]$"):
        environment.home()
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path / "new/home"))
    assert environment.home() == tmp_path / "new/home"
    assert not (tmp_path / "new").exists()


def test_a_home_on_a_read_only_disk_is_not_replaced_by_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with refused("read-only disk; let .* write there. Another home would begin with an empty ledger[.]$"):
        environment.home()


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ("disabled", "disabled"),
        ("offline", "offline"),
        ("dryrun", "offline"),
        ("Online", "online"),
        ("", "online"),
    ],
)
def test_wandb_mode_of_the_environment_wins(
    environment: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", environment)
    assert params.parse({"tracking": {"mode": "online"}}, reads=("tracking",)).tracking.mode == mode


def test_unknown_wandb_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "off")
    with refused_as("bad_variable", params.ParamsRefusedError, value="off", variable="WANDB_MODE"):
        params.parse({}, reads=("tracking",))
