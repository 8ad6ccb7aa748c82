"""Run folders: lines are appended as they finish, the manifest comes last, any stop can resume.

A folder has ``params.json`` (everything that its lines depend on), ``responses.jsonl`` and, as the
only sign of success, ``manifest.json``.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from igcore import Prompt, RunError
from igcore.files import PART, append_line, locked, whole_lines, writing
from igcore.progress import progress

from ..files import replace_file
from ..linefile import Fields, key, line_digest, read_mapping, root_of, sealed
from ..provenance import UNPACKED, made_by, now

ASIDE = ".replaced"  # folder that keeps what was replaced
# written by whoever runs the notebook, before and after this module writes
NOTEBOOK = "executed.ipynb"


@dataclass
class Run:
    """A folder being filled.

    Attributes
    ----------
    params : dict
        The identity with which it was opened: everything that its lines depend on; and the time of
        its first start.
    """

    folder: Path
    params: Fields
    lines: list[Fields] = field(default_factory=list)

    @property
    def responses(self) -> Path:
        """The file of its lines."""
        return self.folder / "responses.jsonl"

    @property
    def manifest(self) -> Path:
        """The file whose presence marks the run as complete."""
        return self.folder / "manifest.json"

    def append(self, line: Fields) -> None:
        """Append a line, see `sealed`."""
        line = sealed(line)
        append_line(self.responses, line)
        self.lines.append(line)

    def fill(
        self,
        work: Sequence[tuple[str, Sequence[Prompt]]],
        lines_of: Callable[[str, Sequence[Prompt]], Iterable[Fields]],
    ) -> None:
        """Append the lines that the run lacks.

        Parameters
        ----------
        work : sequence of (method, group of prompts)
            All lines of the run, in the order of decoding.
        lines_of : callable
            Makes the lines of all prompts of a group under a method.
        """
        done = {key(line) for line in self.lines}
        with writing(self.folder):
            self.responses.touch()  # a shard without a group is complete, too
        total = sum(len(group) for _, group in work)
        if done:
            print(f"{self.folder.name}: an earlier start has left {len(done)} of {total} lines")
        with progress(total, self.folder.name) as bar:
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
def open_run(folder: Path, identity: Fields) -> Iterator[Run]:
    """Open a run folder for writing, locked, with the lines that an earlier start has finished.

    A folder of another identity, without one, or from packed records is not mixed with this run: it
    is moved aside to ``.replaced``, and one sentence says what changed.

    Parameters
    ----------
    identity : dict
        JSON values on which the lines depend: parameters, versions, digests of code, files and
        prompts.

    Raises
    ------
    RunError
        When another process is writing to the folder, the disk is full, or a line was changed
        since it was written.
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
                aside = folder.parent / ASIDE / f"{folder.name}.{time.time_ns()}"
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)
                folder.mkdir()
                print(f"{why} in {folder.name}: its files are now in {aside}, and a new run starts")
            run.params = identity | {"began_at": _began_at(folder)}
            _write_json(folder / "params.json", run.params)
            run.lines = sound_lines(run.responses)  # what an earlier start has finished
        yield run


def _began_at(folder: Path) -> str:
    """Return the time of a run's first start, as its params.json has it, or of this start."""
    with suppress(RunError, LookupError):
        began: str = read_mapping(folder / "params.json")["began_at"]
        return began
    return now()


def _foreign(folder: Path, identity: Fields) -> str:
    """Say why a folder is not of this identity; return "" when it is, or when it is empty."""
    if (folder / UNPACKED).exists():
        return "packed records were"
    try:
        old = read_mapping(folder / "params.json")
    except RunError:
        files = [p for p in folder.iterdir() if p.suffix != PART and p.name != NOTEBOOK]
        return "params.json was missing or damaged" if files else ""
    old.pop("began_at", None)
    changed = ", ".join(changes(old, identity))
    return f"{changed} changed since the last run" if changed else ""


def changes(old: object, new: object, name: str = "") -> Iterator[str]:
    """Yield the names that differ between two identities, as paths such as ``parts.cost``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for part in sorted(old.keys() | new.keys()):
            yield from changes(old.get(part), new.get(part), f"{name}.{part}".lstrip("."))
    elif old != new:
        yield name


def sound_lines(path: Path) -> list[Fields]:
    """Return the lines of a file as they were written; a half-written last line is dropped.

    Raises
    ------
    RunError
        For a line that was changed since it was written.
    """
    lines = []
    for number, text in enumerate(whole_lines(path), start=1):
        unchanged = False
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            line = json.loads(text)
            unchanged = line["digest"] == line_digest(line)
        if not unchanged:
            raise RunError(
                f"line {number} of {path} was changed since it was written; delete the line and "
                "run again, which answers its prompt again"
            )
        lines.append(line)
    return lines


# --- writing --------------------------------------------------------------------------------------


def _write_json(path: Path, value: Fields) -> None:
    """Write a JSON file whole or not at all."""
    replace_file(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
