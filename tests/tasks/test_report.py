"""The report stage: what it writes, what it refuses, and that its plain words are true."""

import hashlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import risk, rounded_up
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.card import load, trace_schedule, verify
from algorithms.privacy.card.text import NOTHING_LEARNED, STARTED, TRANSFORMS
from data import DatasetInfo
from data.card import DataRefusedError
from data.files import public_key
from tasks.config import home
from tasks.report import Report, epsilon_curve, overall_accuracy, report
from tests.support.refusals import refused_as
from tests.support.synthetic_run import DELTA, Folders, Kind, read_json, with_entries, write_json, write_run

WRITTEN = ("privacy_card.json", "report.html", "plots/epsilon.csv")
PICTURES = ("epsilon", "risk", "noise", "confusion", "per_class")


def make(folders: Folders) -> Report:
    return report(artifacts=folders.artifacts, prepared=folders.prepared, root=folders.artifacts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_run(tmp_path_factory.mktemp("run"), steps=60)


@pytest.fixture(scope="module")
def finished(folders: Folders) -> Report:
    return make(folders)


@pytest.fixture(scope="module")
def page(folders: Folders, finished: Report) -> str:
    return (folders.artifacts / "report.html").read_text(encoding="utf-8")


class Links(HTMLParser):
    """Everything a page could load, the tags it uses and the text it shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_card_that_was_written_holds(folders: Folders, finished: Report) -> None:
    written = load(folders.artifacts / "privacy_card.json")
    assert verify(written, folders.artifacts).passed
    assert written == finished.card
    for name in PICTURES:
        assert (folders.artifacts / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_card_is_signed_with_the_key_of_the_home(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    first, second = make(folders).card, make(folders).card
    assert first == second and verify(first, folders.artifacts, key=public_key(home())).passed
    (home() / "owner.key").unlink()
    with refused_as("bad_owner_key", DataRefusedError):
        make(folders)
    (home() / "owner.pub").unlink()
    other = make(folders).card
    assert other != first and other.sign(None) == first.sign(None)
    assert verify(other, folders.artifacts, key=public_key(home())).passed
    assert not verify(first, folders.artifacts, key=public_key(home())).passed


def test_the_page_needs_nothing_else(page: str) -> None:
    parsed = Links(page)
    assert len(parsed.links) >= 9
    assert all(link.startswith("data:") for link in parsed.links)
    assert parsed.tags.isdisjoint({"script", "iframe", "object", "embed", "form", "base"})
    assert not {part for part in ("url(", "@import") if part in page}
    assert "default-src 'none'" in page


def test_the_page_says_what_was_spent_and_what_it_means(page: str, finished: Report) -> None:
    text = " ".join(Links(page).text.split())
    spent = finished.card.setting.epsilon
    assert spent is not None
    promised = risk.profile(finished.run.receipt.schedule)
    caught = float(risk.max_true_positive_rate(promised, 0.01))
    assert caught < DELTA + 0.01 * math.exp(spent)  # what the single point would allow
    assert f"epsilon = {rounded_up(spent)}" in text
    assert f"{math.ceil(1000 * caught) / 10:.1f}% of those that were" in text
    assert f"right in at most {math.ceil(1000 * (0.5 + risk.advantage(promised) / 2)) / 10:.1f}%" in text
    assert f"{rounded_up(risk.gaussian_mu(promised), 3)}-Gaussian differential privacy" in text
    assert "80.0%" in text
    assert "This run is not private" not in text
    assert finished.card.signature.public_key in text


def test_the_page_says_what_runs_took_of_the_cap_and_what_ten_more_would(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    path = folders.artifacts / "receipt.json"
    receipt = read_json(path)
    receipt["ledger"]["ten_more"] = {"epsilon": 6.25, "delta": 1e-4}
    write_json(path, receipt)
    made = make(folders)
    text = " ".join(Links((folders.artifacts / "report.html").read_text(encoding="utf-8")).text.split())
    said = re.search(r"When this run was done: (\S+) of (\S+) was spent", text)
    assert said is not None, text[text.find("When this run") :][:300]
    spent = made.run.receipt.ledger.spent.epsilon
    assert said.groups() == (rounded_up(spent), "10")
    assert "After ten more runs like this one, 6.25 would be spent." in text
    assert "do not add up" not in text


def test_the_page_says_why_spent_and_left_exceed_the_cap(tmp_path: Path) -> None:
    """Under Renyi one run has spent more than its own epsilon, and what is left is what one more could have."""
    folders = write_run(tmp_path)
    path = folders.artifacts / "receipt.json"
    receipt = read_json(path)
    receipt["ledger"] |= {
        "composition": {"kind": "renyi", "order": 4.6},
        "spent": {"epsilon": 1.4116041, "delta": 1e-3},
        "remaining": {"epsilon": 9.83819, "delta": 1e-3},
        "ten_more": {"epsilon": 3.0297059, "delta": 1e-3},
    }
    write_json(path, receipt)
    make(folders)
    text = " ".join(Links((folders.artifacts / "report.html").read_text(encoding="utf-8")).text.split())
    assert "When this run was done: 1.412 of 10 was spent, 9.8381 was left." in text
    assert "After ten more runs like this one, 3.03 would be spent." in text
    receipt["ledger"]["ten_more"]["epsilon"] = 10.5
    write_json(path, receipt)
    make(folders)
    page = (folders.artifacts / "report.html").read_text(encoding="utf-8")
    assert "Ten more runs like this one would exceed that." in page
    assert "Here epsilons do not add up: Rényi at order 4.6 adds up other amounts" in text


def test_noisy_counts_by_class_do_not_state_another_accuracy() -> None:
    """Of private records the headline is estimated from all of the histogram, and classes from a part of it."""
    classes = pd.DataFrame({"class": ["a", "b"], "accuracy": [0.5, 1.0], "records": [60, 20]})
    estimate = {"value": 0.7, "low": 0.6, "high": 0.8}
    private = {"held_out": "private", "evaluation_epsilon": 1.0}
    assert overall_accuracy(private | {"test_accuracy": estimate}, classes) == 0.7
    assert overall_accuracy(private | {"test_accuracy": None}, classes) == 0.625
    assert overall_accuracy({"test_accuracy": 0.625}, classes) == 0.625
    empty = pd.DataFrame({"class": ["a"], "accuracy": [math.nan], "records": [0]})
    assert overall_accuracy({"test_micro_f1": 0.0}, empty) == 0.0


def test_a_run_on_a_whole_population_has_no_history(page: str, finished: Report) -> None:
    assert finished.history.blocks.empty
    assert finished.history.retrainings.empty
    assert not {words for words in ("Epsilon by block", "Retrainings") if words in page}
    assert page.count("<picture>") == len(PICTURES)


def test_words_of_the_data_card_stay_words(page: str) -> None:
    assert "Animals &amp; friends &lt;drawn&gt;" in page
    assert "<drawn>" not in page


def test_page_of_a_run_with_diagnostics_says_so(tmp_path: Path) -> None:
    """And what the model is made of."""
    folders = write_run(tmp_path)
    path = folders.artifacts / "receipt.json"
    write_json(path, read_json(path) | {"diagnostics": True})
    assert make(folders).card.setting.private is False
    text = Links((folders.artifacts / "report.html").read_text(encoding="utf-8")).text
    assert "This run is not private. Diagnostics were computed" in " ".join(text.split())
    assert "as if nothing had been shown beside its noisy releases" in text
    assert all(words in text for words in (TRANSFORMS["none"], NOTHING_LEARNED))


@pytest.mark.parametrize("kind", ["private", "seeded", "none"])
def test_the_page_of_a_model_with_a_start_says_that_its_people_count_too(tmp_path: Path, kind: Kind) -> None:
    folders = write_run(tmp_path, kind=kind)
    write_json(
        folders.prepared / "public.json", read_json(folders.prepared / "public.json") | {"public": True}
    )
    plan = read_json(folders.artifacts / "plan.json")
    plan["model"]["files"] = {"start": "a" * 64}
    write_json(folders.artifacts / "plan.json", plan)
    receipt = read_json(folders.artifacts / "receipt.json")
    receipt["sha256"]["plan.json"] = hashlib.sha256(
        (folders.artifacts / "plan.json").read_bytes()
    ).hexdigest()
    receipt["description_sha256"] = DatasetInfo.read(folders.prepared).digest
    write_json(folders.artifacts / "receipt.json", receipt)
    make(folders)
    text = Links((folders.artifacts / "report.html").read_text(encoding="utf-8")).text
    assert " ".join(text.split()).count(STARTED) >= 1


@pytest.mark.parametrize(("kind", "words"), [("none", "No noise was added"), ("seeded", "seeded generator")])
def test_a_run_without_privacy_says_so_at_the_top(tmp_path: Path, kind: Kind, words: str) -> None:
    folders = write_run(tmp_path, kind=kind)
    make(folders)
    text = " ".join(Links((folders.artifacts / "report.html").read_text(encoding="utf-8")).text.split())
    assert words in text[text.index("This run is not private") :][:200]
    assert "they recognise at most" not in text
    assert "Nobody." in text


def test_a_run_without_noise_has_no_curve(tmp_path: Path) -> None:
    folders = write_run(tmp_path, kind="none")
    finished = make(folders)
    assert finished.curve.steps == []
    assert (folders.artifacts / "plots" / "epsilon.csv").read_text() == "step,epsilon\n"
    assert finished.card.setting.epsilon is None


def test_epsilon_over_steps_is_the_account_of_the_releases_so_far(folders: Folders, finished: Report) -> None:
    curve = pd.read_csv(folders.artifacts / "plots" / "epsilon.csv")
    trace = pd.read_parquet(folders.artifacts / "trace.parquet")
    assert 16 <= len(curve) <= 24
    assert (curve["step"].iloc[0], curve["step"].iloc[-1]) == (1, 60)
    assert curve["epsilon"].iloc[-1] == finished.card.setting.epsilon
    assert curve["epsilon"].is_monotonic_increasing
    for step, cost in curve[["step", "epsilon"]].itertuples(index=False):
        so_far = trace[trace["step"] < step]
        assert len(so_far) == step + 1  # the count, and a gradient a step
        exact = epsilon(trace_schedule(so_far), DELTA)
        assert exact / 1.0001 <= cost <= exact * 1.01  # of the grid of `exact` a ten-thousandth is left


def test_a_spend_chosen_on_the_way_is_drawn_as_the_run_kept_count(finished: Report) -> None:
    plan = with_entries(finished.run.plan, filter={"kind": "zcdp", "rho": 1.0})
    run = type(finished.run)(**{**vars(finished.run), "plan": plan})
    curve = epsilon_curve(run)
    kept = finished.run.trace.groupby("step")["epsilon"].last()
    assert curve.epsilon == [kept[step - 1] for step in curve.steps]


@pytest.mark.parametrize("missing", ["metrics.json", "receipt.json", "trace.parquet", "plots/per_class.csv"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    folders = write_run(tmp_path)
    (folders.artifacts / missing).unlink()
    with refused_as("missing_file", path=folders.artifacts / missing):
        make(folders)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "20250101T120000-ffffffff"},
        {"run_id": None},
        {"epsilon": 0.01},
    ],
)
def test_metrics_of_another_run_are_refused_and_nothing_is_written(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folders = write_run(tmp_path)
    path = folders.artifacts / "metrics.json"
    metrics = read_json(path) | change
    write_json(path, {name: value for name, value in metrics.items() if value is not None})
    with refused_as("files_of_two_runs"):
        make(folders)
    assert not [name for name in WRITTEN if (folders.artifacts / name).exists()]


def test_files_that_do_not_belong_together_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    plan = read_json(folders.artifacts / "plan.json")
    write_json(folders.artifacts / "plan.json", {**plan, "noise_multiplier": 2.0})
    with pytest.raises(RefusedError, match=r"plan\.json"):
        make(folders)
    assert not [name for name in WRITTEN if (folders.artifacts / name).exists()]


def test_a_card_without_what_it_must_state_fails_the_stage(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    receipt = read_json(folders.artifacts / "receipt.json")
    write_json(folders.artifacts / "receipt.json", {**receipt, "population": ""})
    with refused_as("card_incomplete", field="population"):
        make(folders)
    assert not (folders.artifacts / "privacy_card.json").exists()


@pytest.mark.parametrize("change", [{"unit": "one gallery"}, {"title": "Plants"}, {"records": None}])
def test_data_that_are_described_otherwise_than_in_training_are_refused(
    tmp_path: Path, change: dict[str, str | None]
) -> None:
    folders = write_run(tmp_path)
    path = folders.prepared / "public.json"
    before = path.read_bytes()
    write_json(path, read_json(path) | change)
    with refused_as("unlike_training"):
        make(folders)
    assert not [name for name in WRITTEN if (folders.artifacts / name).exists()]
    path.write_bytes(before)
    assert make(folders).card.setting.unit == "one drawing"


def test_what_training_recorded_about_the_software_is_kept(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    ran = {"recorded": "training", "python": "3.99.0", "packages": {"torch": "9.9"}, "git": None}
    write_json(
        folders.artifacts / "receipt.json", read_json(folders.artifacts / "receipt.json") | {"software": ran}
    )
    assert make(folders).card.implementation.python == "3.99.0"
