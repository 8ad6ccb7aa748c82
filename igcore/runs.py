"""Run folders: responses appended as they finish, the manifest written last, resume after any stop.

Knows files and the order of work; leaves decoding to `search` and lines to `records`. A folder ``runs/<profile>/<run>`` holds
``params.json``, ``responses.jsonl`` and, as the only sign of success, ``manifest.json``.

The unit of work is one method on one group of prompts, fixed by the parameters; so shards and resumes never change a result.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from . import records
from .critic_spec import asked, check_critic
from .decode_params import DecodeParams
from .decoding import decode
from .errors import IgcoreError, ParameterError, RunError
from .methods import METHODS, settings_of
from .networks import load_networks
from .packed import packed
from .policy import Policy, load_policy
from .progress import progress
from .prompts import Prompt, load_prompts
from .scorers import Scorer, load_scorer

EXAMPLES = "examples"  # how the names of runs begin whose answers are shown and never counted
VERSIONS = ("igcore", "torch", "transformers", "numpy")
# the modules that decide a response; a change in one of them starts a run anew
DECISIVE = (
    "budget config convert critic critic_spec decoding diversity dynamic engine job latent memory methods packed policy pretrained "
    "prompts promptsets response sampling search shared_prefix scorers/__init__ scorers/beaver scorers/classifier scorers/embedded "
    "scorers/guard scorers/llama scorers/lm scorers/qrm scorers/source tabular templates tokenwise value"
).split()


def root() -> Path:
    """Return the nearest folder above the current one that holds ``notebooks`` and ``params``, else the current one."""
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / "notebooks").is_dir() and (p / "params").is_dir()), here)


@dataclass
class Run:
    """A folder being filled; `scorers` holds those of its lines by name."""

    folder: Path
    params: dict
    lines: list[dict] = field(default_factory=list)
    scorers: dict[str, Scorer] = field(default_factory=dict)

    @property
    def responses(self) -> Path:
        return self.folder / "responses.jsonl"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def frame(self) -> pd.DataFrame:
        """The lines, one row each."""
        return pd.DataFrame(self.lines)

    def append(self, line: dict) -> None:
        records.append(self.responses, line)
        self.lines.append(line)

    def finish(self, manifest: dict) -> None:
        """Write the manifest, atomically and last."""
        with disk(self.folder):
            _write_json(self.manifest, manifest)


def _write_json(path: Path, value: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write in {folder} ({error.strerror}); free some space or choose another folder") from error


@contextmanager
def open_run(folder: Path, identity: dict) -> Iterator[Run]:
    """Open a run folder for writing, alone, with the lines that an earlier start has finished.

    A folder that holds a run of another identity is not mixed with this one: it is moved aside to ``.replaced``.

    Parameters
    ----------
    identity : dict
        JSON values on which the responses depend: parameters, versions, hashes.

    Raises
    ------
    RunError
        When another process is writing to it, the disk is full, or its lines cannot be read.
    """
    identity = json.loads(json.dumps(identity))
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process is writing to {folder}; wait for it, or choose another run name") from error
        with disk(folder):
            if changed := _changed(folder / "params.json", identity):
                aside = folder.parent / ".replaced" / f"{folder.name}.{time.time_ns()}"
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)
                folder.mkdir()
                print(f"{', '.join(changed)} changed since the last run in {folder.name}: its files are now in {aside}")
            _write_json(folder / "params.json", identity)
            run = Run(folder, identity)
            records.drop_half_line(run.responses)
        if run.responses.exists():
            run.lines = records.read(run.responses)
        yield run


def _changed(known: Path, identity: dict) -> list[str]:
    """Name what differs from the identity of the run that a folder holds; nothing when it holds none."""
    if not known.exists():
        return []
    try:
        old = json.loads(known.read_text(encoding="utf-8"))
    except ValueError:
        return [known.name]
    return sorted(name for name in old.keys() | identity.keys() if old.get(name) != identity.get(name))


def groups_of(params: DecodeParams, prompts: list[Prompt]) -> list[list[Prompt]]:
    """Return the groups of this shard: consecutive prompts, in the order of their ids that `load_prompts` gives.

    Raises
    ------
    ParameterError
        When there are more shards than groups.
    """
    groups = [prompts[i : i + params.group_size] for i in range(0, len(prompts), params.group_size)]
    if params.n_shards > len(groups):
        raise ParameterError(
            f"n_shards is {params.n_shards}, but {len(prompts)} prompts in groups of group_size {params.group_size} make "
            f"{len(groups)} groups; use at most {len(groups)} shards"
        )
    return groups[params.shard :: params.n_shards]


def decode_run(params: DecodeParams, folder: Path | None = None) -> Run:
    """Decode prompts by several methods into a run folder; start it again after any stop and it goes on.

    Parameters
    ----------
    folder : Path, optional
        By default ``runs/<profile>/<run>`` under `root`, with the shard's number appended when there are several.

    Returns
    -------
    Run
        With all its lines.
    """
    import torch

    torch.set_num_threads(params.threads)
    shard = f".{params.shard}-of-{params.n_shards}" if params.n_shards > 1 else ""
    folder = folder or root() / "runs" / params.profile / f"{params.run}{shard}"
    cost, reward = load_scorer(params.cost), load_scorer(params.reward)
    prompts = load_prompts(params.prompts, params.split, params.limit, params.hardest, cost if params.hardest else None)
    policy = load_policy(params.policy, params.dtype, params.device)
    networks, weights = load_networks(params, root(), policy, cost, reward)
    for method in params.methods:
        check_critic(method, networks.get(asked(method)), policy, reward, cost, settings_of(method, params.search()))
    identity = asdict(params) | {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "code": code_digest(),
        "digests": {part.name: part.digest for part in (policy, cost, reward)} | weights,
        "device": str(policy.model.device),
    }
    with open_run(folder, identity) as run, packed(policy.model):  # here as well as in every search, which then finds it done
        run.scorers = {scorer.name: scorer for scorer in (cost, reward)}
        decode_missing(params, run, prompts, policy, cost, reward, networks)
        run.finish(manifest_of(run))
    return run


def decode_missing(
    params: DecodeParams,
    run: Run,
    prompts: list[Prompt],
    policy: Policy,
    cost: Scorer,
    reward: Scorer,
    networks: Mapping | None = None,
) -> None:
    """Decode every group that the run does not hold yet, and append its responses one by one.

    `networks` holds what methods ask, see `igcore.networks.load_networks`.
    """
    done = {records.key(line) for line in run.lines}
    work = [(method, group) for method in params.methods for group in groups_of(params, prompts)]
    if any((method, prompt.id) not in done for method, group in work for prompt in group):
        run.manifest.unlink(missing_ok=True)  # no longer the sign of success
    bar = progress(sum(len(group) for _, group in work), params.run)
    for method, group in work:
        missing = [prompt.id for prompt in group if (method, prompt.id) not in done]
        if missing:  # the whole group, even when some of its lines exist: its results depend on its composition
            settings = settings_of(method, params.search())
            with_settings = {"config": params.search(), "seed": params.seed, "memory_gb": params.memory_gb}
            critic = (networks or {}).get(asked(method))
            answers = decode(method, policy, group, reward=reward, cost=cost, critic=critic, **with_settings)
            for response in answers:
                if response.prompt_id in missing:
                    about = (method, policy.name, params.seed, settings, params.block_size)
                    run.append(records.record(response, *about, cost, reward))
        bar.update(len(group))
    bar.close()


def code_digest() -> str:
    """Hash the modules that decide a response."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in DECISIVE)).hexdigest()


def manifest_of(run: Run) -> dict:
    """Say what was run, with what, and what came out."""
    seconds = {name: sum(line[name] for line in run.lines) for name in ("generate_s", "cost_s", "reward_s", "critic_s")}
    counts: dict[str, dict[str, int]] = {}
    for line in run.lines:
        of = counts.setdefault(line["method"], {})
        of[line["status"]] = of.get(line["status"], 0) + 1
    return {
        "git_commit": git_commit(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": seconds,
        "near_ties": sum(line["near_ties"] for line in run.lines),
        "lines": len(run.lines),
        "counts": counts,
        "params": run.params,
    }


def git_commit() -> str | None:
    """Return the commit of the working tree, with ``+`` when it has changes; None outside a repository."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def load_runs(profile: str, base: Path | None = None, pattern: str = "*") -> pd.DataFrame:
    """Return the lines of all finished runs of a profile, shards joined, methods in the order of `METHODS`.

    Each has besides the columns of `igcore.records` its ``run`` and ``critic_control``.

    Parameters
    ----------
    pattern : str
        Of the names of folders, such as ``decode-main-*``. ``*`` leaves out those that begin with `EXAMPLES`.

    Raises
    ------
    RunError
        When there is none, or one has not finished.
    """
    base = base or root() / "runs" / profile
    found = _folders(base, pattern)
    if not found:
        raise RunError(f"there is no run in {base / pattern}; decode first with notebook 30_decode")
    for folder in found:
        if not (folder / "manifest.json").exists():
            raise RunError(f"the run {folder} has not finished; run notebook 30_decode with its parameters again")
    known = {folder: json.loads((folder / "params.json").read_text(encoding="utf-8")) for folder in found}
    _check_shards(known)
    known = {f: {"run": p.get("run", f.name), "critic_control": p.get("critic_control", "none")} for f, p in known.items()}
    lines = [line | about for folder, about in known.items() for line in records.read(folder / "responses.jsonl")]
    place = {method: i for i, method in enumerate(METHODS)}
    return pd.DataFrame(sorted(lines, key=lambda line: place.get(line["method"], len(place))))


def _folders(base: Path, pattern: str) -> list[Path]:
    """Return the folders of runs whose names match in alphabetical order; ``*`` leaves out `EXAMPLES`."""
    found = sorted(path.parent for path in base.glob(f"{pattern}/params.json"))
    return [folder for folder in found if pattern != "*" or not folder.name.startswith(EXAMPLES)]


def load_finished(profile: str, pattern: str = "*") -> tuple[pd.DataFrame, list[str]]:
    """Return `load_runs` of what has finished, and for everything else a sentence that says why it is left out.

    Without a finished run the table is empty, with the columns of `igcore.records.COLUMNS`, ``run`` and ``critic_control``.
    """
    parts = list(each_finished(profile, left_out := [], pattern))
    lines = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*records.COLUMNS, "run", "critic_control"])
    place = {method: i for i, method in enumerate(METHODS)}
    return lines.sort_values(
        "method", key=lambda names: names.map(place).fillna(len(place)), kind="stable", ignore_index=True
    ), left_out


def each_finished(profile: str, left_out: list[str], pattern: str = "*") -> Iterator[pd.DataFrame]:
    """Yield the lines of each finished run, its shards joined; to `left_out` is added why another is not there."""
    names = [folder.name for folder in _folders(root() / "runs" / profile, pattern)]
    for name in dict.fromkeys(re.sub(r"\.\d+-of-\d+$", ".*-of-*", name) for name in names):  # shards as one run
        try:
            lines = load_runs(profile, pattern=name)
        except RunError as error:
            left_out.append(str(error))
        else:
            yield lines


def _check_shards(known: dict[Path, dict]) -> None:
    """Raise ``RunError`` unless every run is there once: whole, or in all its shards."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for folder, params in known.items():
        runs.setdefault(params.get("run", folder.name), []).append((params.get("n_shards", 1), params.get("shard", 0)))
    for name, parts in runs.items():
        n = parts[0][0]
        if sorted(parts) != [(n, i) for i in range(n)]:
            held = ", ".join(f"shard {i} of {n}" for n, i in sorted(parts))
            raise RunError(f"run {name} is there as {held}; decode what is missing, or move away the folders of another sharding")


def _missing(path: Path, lines: list[dict]) -> Iterator[str]:
    """Compare the number of lines with the manifest beside the file, where there is one."""
    manifest = path.with_name("manifest.json")
    expected = json.loads(manifest.read_text(encoding="utf-8"))["lines"] if manifest.exists() else max(len(lines), 1)
    if len(lines) != expected:
        yield f"{path} holds {len(lines)} responses where {expected} are expected"


def loader(responses: Path) -> Callable[[str], Scorer]:
    """Return what loads a scorer by the name that records call it, with the options of the run in whose folder a file lies."""
    params = responses.with_name("params.json")
    given = json.loads(params.read_text(encoding="utf-8")) if params.exists() else {}
    options = [given[role] for role in ("cost", "reward") if isinstance(given.get(role), dict)]
    known = {scorer.name: scorer for scorer in map(load_scorer, options)}
    return lambda name: known[name] if name in known else load_scorer(name)


def main(arguments: list[str] | None = None) -> int:
    """Verify or compare files of responses from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m igcore.runs", description="Check what runs have written.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help="score every emitted text again and confirm its status and numbers")
    check.add_argument("file", type=Path)
    compare = commands.add_parser("compare", help="say in which lines and fields two files differ; seconds do not count")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "verify":
            lines = records.read(asked.file)
            problems = [*_missing(asked.file, lines), *records.verify(lines, loader(asked.file))]
            summary = f"{len(lines)} lines of {asked.file} scored again"
        else:
            problems = records.differences(records.read(asked.a), records.read(asked.b))
            summary = f"{asked.a} and {asked.b} agree in all fields but seconds"
    except IgcoreError as error:
        problems, summary = [str(error)], ""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{summary}: all hold" if asked.command == "verify" else summary)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
