"""The process in which DVC works for one run, `python -P -m tasks.runs.dvc_process`; see `dvc_stages.DvcProcess`.

It reads requests from stdin, a line each: the name of a stage that DVC is to run if it has to, `STATUS_REQUEST` for
whether there is anything to do, an empty line for the end. What DVC and the stages write goes to stdout, and after it a
line that begins with `END_OF_ANSWER` and has the exit status of the request. The process leads a process group with the
stages. When the process that started it ends, its stdin is closed, and it ends with its group: no process is left that
could spend.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tasks.config import SPEND_AGAIN, has_consent
from tasks.runs.dvc_stages import END_OF_ANSWER, NOTHING_TO_DO, STAGES, STATUS_REQUEST
from tasks.runs.stage_main import for_the_owner_only, hide_records

if TYPE_CHECKING:
    from dvc.repo import Repo

_POLL_SECONDS = 0.5


def main() -> None:
    """Answer the requests on stdin until it is closed, or an empty line asks for the end."""
    requests = SimpleQueue[str]()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # Even if the parent process blocks an interrupt, or ignores it, as one that a script started in the background.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with for_the_owner_only():  # DVC reads it when it is imported
        while request := requests.get():
            status = answer(*([] if request == STATUS_REQUEST else [request]))
            sys.stdout.write(f"\n{END_OF_ANSWER}{status}\n")  # a stage may have ended within a line
            sys.stdout.flush()


def _read(requests: SimpleQueue[str]) -> None:
    begun = b""
    while read := os.read(sys.stdin.fileno(), 4096):  # a buffered read would hold a lock at the process's end
        *lines, begun = (begun + read).split(b"\n")
        for line in lines:
            requests.put(line.decode())
    os.killpg(0, signal.SIGKILL)  # the process that asked has ended


def answer(*stages: str) -> int:
    """Let DVC run the stages that have to run; without stages, ask it whether there is anything to do.

    Returns the exit status: NOTHING_TO_DO if there was nothing to do, 1 if DVC or a stage failed; stdout says how.
    """
    from dvc.exceptions import DvcException  # here, since only this process uses DVC
    from dvc.lock import LockError
    from dvc.scm import SCMError

    is_new = any(code_has_changed(stage, Path()) for stage in stages or STAGES)
    is_new |= stages[:1] in ((), ("prepare",)) and has_other_blocks(Path())
    try:
        with _lock_repo(*stages) as repo:
            if stages:
                has_work = bool(repo.reproduce(*stages, single_item=True, force=is_new))
            else:
                has_work = is_new or bool(repo.status(targets="dvc.yaml"))
            hide_records(Path(), Path(repo.cache.local.path))
    except DvcException as error:
        if isinstance(error.__cause__, LockError):
            words = f"{stages[0]} ran, but another dvc command kept DVC from recording it; run the pipeline again."
        elif isinstance(error, SCMError):
            words = f"{error}, which DVC needs; run `git init` there."
        else:
            words = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        sys.stdout.write(f"{words}\n")
        return 1
    return 0 if has_work else NOTHING_TO_DO


def code_has_changed(stage: str, root: Path) -> bool:
    """Whether a stage has to run again, or to refuse, because of code that DVC does not watch.

    That is code of the user's own; and in training that of epsilonflow, if a person agreed to train again.
    """
    from algorithms.extension import NotUsableError, is_own, source_digest
    from data.card import DataRefusedError, data_card
    from data.documents import DocumentError, load_yaml
    from data.files import read_json
    from data.formats import Own

    if stage == "train" and has_consent(SPEND_AGAIN):
        from tasks.runs.software import reuse_note_of

        return reuse_note_of(root) is not None
    if stage not in ("prepare", "calibrate"):
        return False
    try:
        named = load_yaml((root / "params.yaml").read_text(encoding="utf-8"))
        if stage == "prepare":
            if _encoder_has_changed(named["data"], root / "datasets" / "prepared"):
                return True
            reader = data_card(str(named["data"]["dataset"]), root / "data" / "cards").reader
            return isinstance(reader, Own) and source_digest(reader.factory) != reader.source_sha256
        names = {
            group: str((named.get(group) or {}).get("name")) for group in ("algorithm", "features", "model")
        }
        plan = root / "artifacts" / "plan.json"
        digests = read_json(plan)["code"] if plan.exists() else {}
        return any(
            is_own(name) and source_digest(name) != digests.get(group, source_digest(name))
            for group, name in names.items()
        )
    except NotUsableError:
        return True
    except (
        OSError,
        DocumentError,
        DataRefusedError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ):
        return False  # the stage says what is wrong


def _encoder_has_changed(data: Mapping[str, object], prepared: Path) -> bool:
    """Whether an encoder of the user's own has other code or weights than when the data were prepared."""
    from algorithms.extension import is_own
    from tasks.config.params import DataParams

    chosen = DataParams.model_validate(dict(data)).encoder
    if chosen is None or not is_own(chosen.name) or not (prepared / "public.json").exists():
        return False
    from data import DatasetInfo
    from tasks.prepare import encoder_of  # here, since few runs need it

    encoder = DatasetInfo.read(prepared).encoder
    return encoder is None or encoder.sha256 != encoder_of(chosen).sha256


def has_other_blocks(root: Path) -> bool:
    """Whether the files of blocks are others than those that were prepared.

    DVC watches their names alone: a checksum of their content in dvc.lock would say something about private records.
    """
    from data.card import data_card
    from tasks.config import home, params

    try:
        chosen = params.load(root / "params.yaml", reads=("data",)).data
        card = data_card(chosen.dataset, root / "data" / "cards")
        if card.blocks is None:
            return False
        from data import prepared  # here, since most data sets have no blocks, and readers import much
        from data.files import PUBLIC_KEY, owner_key
        from data.reading import blocks_have_changed

        digests = prepared.block_digests(root / "datasets" / "prepared")
        key = PUBLIC_KEY if card.public else owner_key(home())
        return blocks_have_changed(card, chosen.blocks, digests, root=root, key=key)
    except (OSError, ValueError):
        return False  # the stage says what is wrong


@contextmanager
def _lock_repo(*stages: str) -> "Iterator[Repo]":
    """DVC's view of the checkout, with the locks that DVC takes for these stages; waits for other dvc commands.

    DVC takes the locks again, which works within the same process. So a later failure of DVC is due to the stage.
    """
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo
    from dvc.rwlock import RWLOCK_FILE, RWLockFileCorruptedError, rwlock

    logging.getLogger("dvc").setLevel(logging.WARNING)  # otherwise it explains how to use git
    logging.getLogger("dvc.stage").setLevel(logging.INFO)
    repo, has_warned = Repo(), False
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(lock_repo(repo))
                for stage in [stage for name in stages for stage in repo.stage.collect(name)]:
                    inputs, outputs = ([item.fs_path for item in items] for items in (stage.deps, stage.outs))
                    held.enter_context(
                        rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), inputs, outputs, hardlink=False)
                    )
            except LockError as error:
                if not has_warned:
                    # With what to do where that command was killed, and another program has its number.
                    why = " ".join(str(error).split())
                    sys.stdout.write(f"waiting for another dvc command in this checkout: {why}\n")
                has_warned = True
            except RWLockFileCorruptedError:  # a command was killed while it wrote the file
                Path(str(repo.tmp_dir), RWLOCK_FILE).unlink(missing_ok=True)
                continue
            else:
                yield repo
                return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
