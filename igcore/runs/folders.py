"""Run folders: lines are appended as they finish, the manifest comes last, any stop can resume.

A folder has ``params.json`` (everything that its lines depend on), ``responses.jsonl`` and, as the
only sign of success, ``manifest.json``.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import PART, locked, replace_file, writing
from ..policy import Prompt
from ..progress import progress
from ..report.linefile import Fields, Key, key, line_digest, root_of, sealed
from ..report.provenance import made_by

ASIDE = ".replaced"  # folder that keeps what was replaced
# written by whoever runs the notebook, before and after this module writes
NOTEBOOK = "executed.ipynb"


@dataclass
class Run:
    """A folder being filled.

    Attributes
    ----------
    params : dict
        The identity with which it was opened: everything that its lines depend on.
    scorers : dict of str to Scorer
        The scorers of its lines, by name.
    """

    folder: Path
    params: Fields
    lines: list[Fields] = field(default_factory=list)
    scorers: dict[str, Any] = field(default_factory=dict)

    @property
    def responses(self) -> Path:
        """The file of its lines."""
        return self.folder / "responses.jsonl"

    @property
    def manifest(self) -> Path:
        """The file that says that the run is complete."""
        return self.folder / "manifest.json"

    def append(self, line: Fields) -> None:
        """Append a line, see `sealed`."""
        line = sealed(line)
        append(self.responses, line)
        self.lines.append(line)

    def fill(
        self,
        work: Sequence[tuple[str, Sequence[Prompt]]],
        lines_of: Callable[[str, Sequence[Prompt]], Iterable[Fields]],
        label: str,
    ) -> None:
        """Append the lines that the run lacks.

        Parameters
        ----------
        work : sequence of (method, group of prompts)
            All lines of the run, in the order of decoding.
        lines_of : callable
            Makes the lines of all prompts of a group under a method.
        label : str
            Name of the progress bar.
        """
        done = {key(line) for line in self.lines}
        with writing(self.folder):
            self.responses.touch()  # a shard without a group is complete, too
        total = sum(len(group) for _, group in work)
        if done:
            print(f"{label}: an earlier start has left {len(done)} of {total} lines")
        with progress(total, label) as bar:
            for method, group in work:
                missing = [prompt.id for prompt in group if (method, prompt.id) not in done]
                if missing:
                    with writing(self.folder):
                        self.manifest.unlink(missing_ok=True)  # a manifest is the sign of success
                # decode the whole group even if some lines exist: a result depends on its group
                for line in lines_of(method, group) if missing else ():
                    if line["prompt_id"] in missing:
                        self.append(line)
                bar.update(len(group))

    def finish(self, manifest: Fields) -> None:
        """Write the manifest with commit, processor and root hash, atomically and last."""
        manifest = json.loads(json.dumps(manifest | made_by(), allow_nan=False))
        digest = root_of(self.params, self.lines, manifest)
        _write_json(self.manifest, manifest | {"root": digest})


# --- groups ---------------------------------------------------------------------------------------


def groups_of(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Return the groups of `size` consecutive prompts; shards and resumed runs take whole groups.

    Float sums depend on which prompts share a batch, so neither of them changes a result.
    """
    return [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]


# --- opening --------------------------------------------------------------------------------------


@contextmanager
def open_run(
    folder: Path, identity: Fields, wanted: Collection[Key] | None = None
) -> Iterator[Run]:
    """Open a run folder for writing, locked, with the lines that an earlier start has finished.

    A folder of another identity, or without one, is not mixed with this run: it is moved aside to
    ``.replaced``, and one sentence says what changed. The same happens to lines that were changed
    since they were written, or that are no longer wanted.

    Parameters
    ----------
    identity : dict
        JSON values on which the lines depend: parameters, versions, digests of code, files and
        prompts.
    wanted : collection of (method, prompt_id), optional
        The lines to keep; by default all.

    Raises
    ------
    RunError
        When another process is writing to the folder, or the disk is full.
    """
    identity = json.loads(json.dumps(identity))  # as it is read back: a tuple is a list
    busy = f"another process is writing to {folder}; wait for it, or choose another run name"
    # not in the folder, which may be moved aside while this process has the lock
    with locked(folder.parent / f".{folder.name}.lock", busy):
        run = Run(folder, identity)
        with writing(folder):
            folder.mkdir(exist_ok=True)
            for left in folder.glob(f".*{PART}"):  # by a start that was killed
                left.unlink()
            if why := _foreign(folder, identity):
                aside = _place_aside(folder)
                folder.rename(aside)
                folder.mkdir()
                print(f"{why} in {folder.name}: its files are now in {aside}, and a new run starts")
            _write_json(folder / "params.json", identity)
            run.lines = sound_lines(run.responses, wanted)  # what an earlier start has finished
        yield run


def _foreign(folder: Path, identity: Fields) -> str:
    """Say why a folder is not of this identity; return "" when it is, or when it is empty."""
    known = folder / "params.json"
    if not known.exists():
        files = [p for p in folder.iterdir() if p.suffix != PART and p.name != NOTEBOOK]
        return "params.json was missing" if files else ""
    try:
        old = dict(json.loads(known.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):  # no mapping, or brackets without end
        return "params.json was damaged"
    changed = list(changes(old, identity))
    names = ", ".join(changed[:6])
    more = " and more" if len(changed) > 6 else ""
    return f"{names}{more} changed since the last run" if changed else ""


def changes(old: object, new: object, name: str = "") -> Iterator[str]:
    """Yield the names that differ between two identities, as paths such as ``parts.cost``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for part in sorted(old.keys() | new.keys()):
            yield from changes(old.get(part), new.get(part), f"{name}.{part}".lstrip("."))
    elif old != new:
        yield name


def _place_aside(folder: Path) -> Path:
    """Return a new path to which something of a folder is moved aside."""
    aside = folder.parent / ASIDE / f"{folder.name}.{time.time_ns()}"
    aside.parent.mkdir(exist_ok=True)
    return aside


def sound_lines(
    path: Path, wanted: Collection[Hashable] | None = None, by: Callable[[Fields], Hashable] = key
) -> list[Fields]:
    """Return the lines of a file that are unchanged and still wanted, each key once.

    All other lines are removed from the file, and one sentence says so. A copy of the file as it
    was is kept aside, and its manifest is deleted.

    Parameters
    ----------
    wanted : collection, optional
        Keys to keep; by default all.
    by : callable
        Returns the key of a line.
    """
    if not path.exists():
        return []
    drop_half_line(path)
    raw = path.read_bytes().split(b"\n")[:-1]
    kept: dict[Hashable, tuple[bytes, Fields]] = {}
    for text in raw:  # as bytes, so that the lines that stay do not change
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            line = json.loads(text)
            name = by(line)
            unchanged = line["digest"] == line_digest(line)
            if unchanged and (wanted is None or name in wanted):
                kept.setdefault(name, (text, line))
    if lost := len(raw) - len(kept):
        path.with_name("manifest.json").unlink(missing_ok=True)  # no longer the sign of success
        aside = _place_aside(path.parent)
        aside.mkdir()
        shutil.copy2(path, aside / path.name)
        replace_file(path, b"".join(text + b"\n" for text, _ in kept.values()))
        print(
            f"{lost} lines of {path} were changed since they were written, or answer what is "
            f"not asked for: the file as it was is now in {aside}, and these lines are left out"
        )
    return [line for _, line in kept.values()]


# --- writing --------------------------------------------------------------------------------------


def append(path: Path, line: Fields) -> None:
    """Append one line and force it to the disk, or leave the file as it was.

    Raises
    ------
    RunError
        When it cannot be written, as on a full disk.
    """
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    with writing(path.parent), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:  # the system may take part of the bytes only
                data = data[os.write(file.fileno(), data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # half a line would hide the next one
            raise


def drop_half_line(path: Path) -> None:
    """Cut a file after its last complete line."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def _write_json(path: Path, value: Fields) -> None:
    """Write a JSON file whole or not at all."""
    replace_file(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
