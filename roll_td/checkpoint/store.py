"""Checkpoints on disk: `step_N` folders that are whole or don't count.

A checkpoint is written as `step_N.partial`. When all of it is on the disk it gets its completion
mark, last its name. The mark says which run made it and how long each file is.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_td.checkpoint.files import read_json, sync, sync_tree, write_json

logger = logging.getLogger(__name__)

MARK = "complete.json"
_STEP = re.compile(r"step_(0|[1-9]\d*)(\.partial|\.replaced)?")


@contextmanager
def new_checkpoint(folder: Path, step: int, run: str) -> Iterator[Path]:
    """`with new_checkpoint(…) as partial:` fill the folder `partial`; afterwards it is complete,
    as folder/step_N. An exception leaves it incomplete, and what was there before as it was.

    A complete step_N of this run is replaced; anything else of that name is moved aside.
    """
    partial = folder / f"step_{step}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    yield partial
    sync_tree(partial)
    write_json(partial / MARK, {"run": run, "files": _sizes(partial)})
    sync(partial)
    _put_in_place(partial)


def find_start(folder: Path, resume: str) -> Path | None:
    """The checkpoint that a run goes on from, by the setting `resume`; None to begin at step 0.

    A run that has complete checkpoints of its own in `folder` goes on from the newest. ValueError
    where that is not what `resume` says, or what it names is no complete checkpoint.
    """
    own = find_newest(folder)
    if resume == "none" and own is not None:
        raise ValueError(
            f"resume=none, but this run has checkpoints up to {own}: two runs in one folder would "
            "mix; set another exp_name, or resume=auto to go on"
        )
    if resume in ("auto", "none"):
        return own
    given = Path(resume)
    if own is None:
        fault = fault_of(given) if step_of(given) is not None else "it is not named step_N"
        if fault is not None:
            raise ValueError(
                f"resume={resume} is no complete checkpoint: {fault}; give the path of a step_N "
                "folder, or auto"
            )
        return given
    if given.resolve().parent == folder.resolve() and given.resolve() != own.resolve():
        raise ValueError(
            f"resume={resume}, but {own} of the same run is newer: to go on from an older one "
            "give another exp_name, or move the newer ones away"
        )
    return own


def find_newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest number; a warning names each newer one that is not."""
    for _, _, path in sorted(_candidates(folder), reverse=True):
        fault = fault_of(path)
        if fault is None:
            # its run may have ended between the mark and the name
            return _put_in_place(path) if path.suffix else path
        logger.warning("%s does not count as a checkpoint: %s", path, fault)
    return None


def fault_of(path: Path) -> str | None:
    """What keeps a folder from being a complete checkpoint; None if nothing does."""
    try:
        files: dict[str, int] = read_json(path / MARK)["files"]
    except FileNotFoundError:
        return f"there is no completion mark {MARK} in it"
    except ValueError as error:
        return str(error)
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size} bytes, not {size}"
    return None


def step_of(path: Path) -> int | None:
    """The number in the name step_N; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and not match[2] else None


def run_of(path: Path) -> str:
    """The run that made a complete checkpoint."""
    return str(read_json(path / MARK)["run"])


def retain(folder: Path, keep: int | None, run: str, busy: Collection[Path] = ()) -> None:
    """Remove what this run no longer needs: its complete checkpoints but the newest `keep` (None:
    all stay) and those that are `busy`, and what was left unfinished. Nothing else is touched."""
    found = _candidates(folder)
    mine = sorted(
        (step, path)
        for step, _, path in found
        if not path.suffix and fault_of(path) is None and run_of(path) == run
    )
    spare = [path for _, path in mine[:-keep] if path not in busy] if keep is not None else []
    # what is half removed must not be taken for complete
    spare = [_rename(path, ".replaced") for path in spare]
    for path in {*spare, *(path for _, _, path in found if path.suffix)}:
        shutil.rmtree(path)


def _candidates(folder: Path) -> list[tuple[int, int, Path]]:
    """Folders named step_N, step_N.partial, step_N.replaced: N, which counts first, path."""
    if not folder.is_dir():
        return []
    order = (".replaced", ".partial", None)
    named = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return [(int(match[1]), order.index(match[2]), path) for match, path in named if match]


def _put_in_place(whole: Path) -> Path:
    """Give a marked checkpoint its name."""
    final, old = whole.with_suffix(""), None
    if final.exists():
        if fault_of(final) is None and run_of(final) == run_of(whole):
            old = _rename(final, ".replaced")
        else:
            moved = final.rename(f"{final}.moved-{time.time_ns()}")
            logger.warning("%s was in the way and is now %s", final, moved)
    whole.rename(final)
    sync(final.parent)
    if old is not None:
        shutil.rmtree(old)
    return final


def _rename(path: Path, suffix: str) -> Path:
    """Give `path` a further suffix, in place of what an earlier end of a run has left there."""
    target = path.with_name(path.name + suffix)
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}
