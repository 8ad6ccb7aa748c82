"""Run folders: parameters checked, responses appended as they finish, the manifest written last, resume after any stop.

Knows files and the order of work; leaves decoding to `search` and lines to `records`. A folder ``runs/<profile>/<run>`` holds
``params.json``, ``responses.jsonl`` and, as the only sign of success, ``manifest.json``.

The unit of work is one method on one group of prompts, fixed by the parameters; so shards and resumes never change a result.
"""

import argparse
import ast
import fcntl
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import pandas as pd

from . import records
from .config import SearchConfig, check_at_least, check_types, from_mapping
from .errors import IgcoreError, ParameterError, RunError, unknown_name
from .methods import METHODS, settings_of
from .policy import Policy, load_policy
from .progress import progress
from .prompts import Prompt, load_prompts
from .scorers import SCORERS, Scorer, check_sign, load_scorer
from .search import decode

VERSIONS = ("igcore", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class DecodeParams(SearchConfig):
    """Everything one run of notebook 30 may be told; the settings of the search are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the run folder, ``runs/<profile>/<run>``.
    policy : str
        See `igcore.load_policy`.
    methods : list of str
        Keys of `igcore.METHODS`, decoded in this order.
    prompts, split, limit, hardest
        See `igcore.load_prompts`; the hardest are chosen by the cost of the prompt.
    reward, cost : str
        Keys of `igcore.SCORERS`.
    seed : int
        Decides every random number.
    dtype, device : str
        See `igcore.load_policy`.
    threads : int
        CPU threads of torch; float sums depend on it in their last bits.
    shard, n_shards : int
        This run decodes the groups whose number is `shard` modulo `n_shards`.
    """

    profile: str
    run: str
    policy: str
    methods: list[str]
    prompts: str
    split: str = "all"
    limit: int | None = None
    hardest: int = 0
    reward: str = "minilm-relevance"
    cost: str = "offensive-language"
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    shard: int = 0
    n_shards: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_types(self)
        check_at_least(self, n_shards=1, shard=0, threads=1)
        if not self.methods:
            raise ParameterError(f"methods is empty; name at least one of {', '.join(METHODS)}")
        for method in self.methods:
            settings_of(method, self.search())
        for role, name in (("reward", self.reward), ("cost", self.cost)):
            if name not in SCORERS:
                raise unknown_name(f"{role} scorer", name, SCORERS)
        if self.shard >= self.n_shards:
            raise ParameterError(f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that")
        if self.limit is not None and self.limit < 1:
            raise ParameterError(f"limit is {self.limit}; give at least 1 prompt, or null for all")

    def search(self) -> SearchConfig:
        """Return the settings of the search alone."""
        return SearchConfig(**{f.name: getattr(self, f.name) for f in fields(SearchConfig)})


@dataclass(frozen=True, kw_only=True)
class OutputParams:
    """Which runs the notebooks 40 and 50 read, and where they write.

    Attributes
    ----------
    profile : str
        Folder of `runs` whose finished runs are read.
    figures : str
        Folder, seen from `root`, for pictures; tables go to its subfolder ``tables``.
    """

    profile: str
    figures: str

    def __post_init__(self):
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class StartParams:
    """Parameters of notebook 00.

    Attributes
    ----------
    policy : str
        See `igcore.load_policy`.
    prompt : str
        What is answered.
    budget : float
        Safety budget, in units of the embedded cost.
    seed : int
        Decides every random number.
    """

    policy: str
    prompt: str
    budget: float
    seed: int

    def __post_init__(self):
        check_types(self)


PARAMS = {"start": StartParams, "decode": DecodeParams, "output": OutputParams}


def notebook_params(kind: str, namespace: Mapping):
    """Return the checked parameters of a notebook.

    papermill only prints a line about a parameter that the notebook does not have; checked by name, a misspelling stops the run.

    Parameters
    ----------
    kind : str
        A key of `PARAMS`.
    namespace : mapping
        ``globals()`` of the notebook, in the cell after the parameters.

    Raises
    ------
    ParameterError
        Naming a parameter that is unknown, missing, of the wrong type or out of range.
    """
    return from_mapping(PARAMS[kind], notebook_parameters(namespace))


def notebook_parameters(namespace: Mapping) -> dict:
    """Collect what the cells that begin with ``# Parameters`` have set, the one that papermill injects included.

    Where a kernel keeps no history of its cells (nbval), that is all plain data in the namespace under a lower-case name.
    """
    sources = [source for source in namespace.get("In", ()) if source.startswith("# Parameters")]
    if not sources:
        plain = (bool, int, float, str, list, dict, type(None))
        return {k: v for k, v in namespace.items() if isinstance(v, plain) and k.islower() and not k.startswith("_")}
    targets = [t for source in sources for node in ast.parse(source).body if isinstance(node, ast.Assign) for t in node.targets]
    return {t.id: namespace[t.id] for t in targets if isinstance(t, ast.Name)}


def root() -> Path:
    """Return the nearest folder above the current one that holds ``notebooks`` and ``params``, else the current one."""
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / "notebooks").is_dir() and (p / "params").is_dir()), here)


@dataclass
class Run:
    """A folder being filled."""

    folder: Path
    params: dict
    lines: list[dict] = field(default_factory=list)

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
        _write_json(self.manifest, manifest)


def _write_json(path: Path, value: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def open_run(folder: Path, params: dict) -> Iterator[Run]:
    """Open a run folder for writing, alone, with the lines that an earlier start has finished.

    A folder that holds a run under other parameters is not mixed with this one: it is moved aside to ``.replaced``.

    Raises
    ------
    RunError
        When another process is writing to it, or its lines cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    params = json.loads(json.dumps(params))
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process is writing to {folder}; wait for it, or choose another run name") from error
        known = folder / "params.json"
        if known.exists() and (old := json.loads(known.read_text(encoding="utf-8"))) != params:
            aside = folder.parent / ".replaced" / f"{folder.name}.{time.time_ns()}"
            aside.parent.mkdir(exist_ok=True)
            folder.rename(aside)
            folder.mkdir()
            changed = sorted(name for name in old.keys() | params.keys() if old.get(name) != params.get(name))
            print(f"{', '.join(changed)} changed since the last run in {folder.name}: its files are now in {aside}")
        _write_json(known, params)
        run = Run(folder, params)
        records.drop_half_line(run.responses)
        if run.responses.exists():
            run.lines = records.read(run.responses)
        yield run


def groups_of(params: DecodeParams, prompts: list[Prompt]) -> list[list[Prompt]]:
    """Return the groups of this shard: consecutive prompts in order of id, the same in any shard."""
    prompts = sorted(prompts, key=lambda prompt: prompt.id)
    groups = [prompts[i : i + params.group_size] for i in range(0, len(prompts), params.group_size)]
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
    check_sign(cost, "cost"), check_sign(reward, "reward")
    prompts = load_prompts(params.prompts, params.split, params.limit, params.hardest, cost if params.hardest else None)
    policy = load_policy(params.policy, params.dtype, params.device)
    identity = asdict(params) | {"versions": versions(), "digests": digests(policy, cost, reward)}
    with open_run(folder, identity) as run:
        decode_missing(params, run, prompts, policy, cost, reward)
        run.finish(manifest_of(run, identity, policy))
    return run


def decode_missing(params: DecodeParams, run: Run, prompts: list[Prompt], policy: Policy, cost: Scorer, reward: Scorer) -> None:
    """Decode every group that the run does not hold yet, and append its responses one by one."""
    done = {records.key(line) for line in run.lines}
    work = [(method, group) for method in params.methods for group in groups_of(params, prompts)]
    bar = progress(sum(len(group) for _, group in work), params.run)
    for method, group in work:
        missing = [prompt.id for prompt in group if (method, prompt.id) not in done]
        if missing:  # the whole group, even when some of its lines exist: its results depend on its composition
            settings = settings_of(method, params.search())
            answers = decode(method, policy, group, reward=reward, cost=cost, config=params.search(), seed=params.seed)
            for response in answers:
                if response.prompt_id in missing:
                    run.append(records.record(response, method, policy.name, params.seed, settings, cost, reward))
        bar.update(len(group))
    bar.close()


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def digests(policy: Policy, cost: Scorer, reward: Scorer) -> dict[str, str]:
    """Return the hashes of everything that was loaded."""
    return {policy.name: policy.digest, cost.name: cost.digest, reward.name: reward.digest}


def manifest_of(run: Run, identity: dict, policy: Policy) -> dict:
    """Say what was run, with what, and what came out."""
    seconds = {name: sum(line[name] for line in run.lines) for name in ("generate_s", "cost_s", "reward_s")}
    counts: dict[str, dict[str, int]] = {}
    for line in run.lines:
        of = counts.setdefault(line["method"], {})
        of[line["status"]] = of.get(line["status"], 0) + 1
    return {
        "git_commit": git_commit(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": str(policy.model.device),
        "seconds": seconds,
        "near_ties": sum(line["near_ties"] for line in run.lines),
        "lines": len(run.lines),
        "counts": counts,
        "params": identity,
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


def load_runs(profile: str, base: Path | None = None) -> pd.DataFrame:
    """Return the lines of all finished runs of a profile, shards joined, one row each.

    Raises
    ------
    RunError
        When there is none, or one has not finished.
    """
    base = base or root() / "runs" / profile
    found = sorted(base.glob("*/params.json"))
    if not found:
        raise RunError(f"there is no run in {base}; decode first with notebook 30_decode")
    for params in found:
        if not (params.parent / "manifest.json").exists():
            raise RunError(f"the run {params.parent} has not finished; run notebook 30_decode with its parameters again")
    lines = [line for params in found for line in records.read(params.parent / "responses.jsonl")]
    return pd.DataFrame(lines)


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
            problems = list(records.verify(lines, load_scorer)) if lines else [f"{asked.file} holds no response"]
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
