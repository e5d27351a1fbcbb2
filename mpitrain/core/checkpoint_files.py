"""The files of the checkpoints in a directory, by their names: none is opened."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"step-(\d+)\.h5")
SHARD_NAME = re.compile(r"(step-[0-9]+)-[0-9a-f]+-[0-9]+-of-[0-9]+\.h5")


def path_for(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:010d}.h5"


def steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a directory by step, the highest first, without verifying them."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.h5"))
    by_step = {int(name[1]): path for name, path in named if name}
    return {step: by_step[step] for step in sorted(by_step, reverse=True)}


def shard_paths(path: Path) -> list[Path]:
    """Return the shards of a checkpoint; see ``sharded``."""
    return [shard for shard in path.parent.glob(f"{path.stem}-*.h5") if _index_of(shard) == path]


def remove_unfinished(folder: Path) -> None:
    """Remove the files of unfinished saves; no save may be in progress."""
    alone = [path for path in folder.glob("step-*.h5") if (index := _index_of(path)) and not index.exists()]
    for path in [*folder.glob("step-*.partial"), *alone]:
        with suppress(OSError):
            path.unlink()


def _index_of(path: Path) -> Path | None:
    """Return the index of a shard, derived from its name; None for other files."""
    named = SHARD_NAME.fullmatch(path.name)
    return path.with_name(f"{named[1]}.h5") if named else None
