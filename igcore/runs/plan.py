"""The plan of a profile before it starts: jobs, tokens, memory, and hours at a measured speed.

``python -m igcore.runs.plan FILE.yaml ...`` prints it. Memory comes from the sizes in a model's
configuration and the engine's own formulas. Hours are the tokens to sample over tokens per second;
the speed is measured from finished runs or given. Without a speed there are no hours. No weights
are loaded and nothing is downloaded.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..baselines.value_training import ValueConfig
from ..beams import settings_of
from ..config import SearchConfig
from ..critic.config import CriticConfig
from ..errors import IgcoreError, ParameterError, needs
from ..models.prompts import SPLITS, check_prompts, load_prompts
from .critic_params import CriticParams
from .decode_params import DecodeParams, network_of
from .paramfiles import ParamFiles
from .rollout_run import METHOD as ROLLOUTS
from .sharing import Sharing, measured
from .sizes import PROMPT_TOKENS, gib_of, policy_of, server_gib

KINDS = {"critic": CriticParams} | dict.fromkeys(("decode", "examples", "regime"), DecodeParams)
# published sizes of the prompt sets that would have to be downloaded
WHOLE = {"rtp": 623, "hex-phi": 300}
TEST_PARTS = {"hh-rlhf": 12451, "pku-saferlhf": 759}  # as the paper's percentages have it
SHARES = {"all": 1.0} | dict(zip(SPLITS, np.diff([0.0, *SPLITS.values()]), strict=True))
SEARCH = "inferenceguard-critic"  # the method by which notebook 20 tries a critic


def count(prompts: str | Mapping, split: str, limit: int | None) -> float:
    """Return how many prompts a run takes, NaN when that is not known. Downloads nothing."""
    source, options = check_prompts(prompts)
    size = math.inf
    if source in WHOLE:
        size = round(WHOLE[source] * SHARES[split])
    elif source not in TEST_PARTS:
        size = len(load_prompts(prompts, split))
    elif (split, options.part) in (("all", "test"), ("test", None), ("all", None)):
        size = TEST_PARTS[source]
    least = min(size, limit or math.inf)
    return math.nan if math.isinf(least) else least


@dataclass(frozen=True)
class Job:
    """One run and what it needs.

    Attributes
    ----------
    file : Path
        Its params file.
    run : str
        Its name.
    policy : str
        Name of the policy.
    prompts : float
        Number of prompts; NaN when it is not known.
    tokens : dict of str to float
        For each method, the most tokens that it samples or considers.
    drawn : dict of str to float
        For each method, those that the runs before leave to it if no block is retried.
    weights : float
        GiB of weights and networks; NaN when the shape of a model is not known.
    prompt : float
        GiB of one prompt of the method that needs most, or of training.
    group : int
        Prompts that are answered together where there is room.
    server : float
        GiB of the server in which its policy stands, with one prompt; 0 where it is loaded.
    """

    file: Path
    run: str
    policy: str
    prompts: float
    tokens: dict[str, float]
    drawn: dict[str, float]
    weights: float
    prompt: float
    group: int
    server: float = 0.0

    @property
    def gib(self) -> float:
        """Return the GiB without which the run cannot do one prompt."""
        return self.weights + self.prompt


# --- jobs -----------------------------------------------------------------------------------------


def most_tokens(method: str, config: SearchConfig) -> int:
    """Return the most tokens that a method samples or considers for one prompt."""
    settings = settings_of(method, config)
    return settings.n_samples * settings.max_new_tokens * settings.rounds


def decode_job(files: ParamFiles, file: Path, params: DecodeParams, pool: Sharing) -> Job:
    """Return the plan of a run of notebook 30, after the runs that a pool has seen."""
    folders = [folder for folder in (params.critic, params.value) if folder]
    lessons = [_trained(files, folder) for folder in folders]
    prompts = count(params.prompts, params.split, params.limit)
    config = params.search()
    tokens = {method: prompts * most_tokens(method, config) for method in params.methods}
    drawn = {method: prompts * pool.drawn(params, method) for method in params.methods}
    policy, _ = policy_of(params.policy)
    sizes = *gib_of(params, params.methods, lessons), params.group_size, server_gib(params)
    return Job(file, params.run, policy, prompts, tokens, drawn, *sizes)


def critic_job(file: Path, params: CriticParams) -> Job:
    """Return the plan of a run of notebook 20: rollouts, training and the search of its trial."""
    test = count(params.prompts, "test", params.test_limit)
    prompts = test + count(params.prompts, "train", params.limit)
    searched = min(params.search_limit, test)
    if params.thresholds:
        searched += len(params.thresholds) * count(params.prompts, "calibrate", None)
    tokens = {SEARCH: searched * most_tokens(SEARCH, params.searching())}
    if not params.rollouts:
        tokens[ROLLOUTS] = prompts * params.n_rollouts * params.max_new_tokens
    lessons = [*params.configs().values(), *filter(None, [params.valuing()])]
    policy, _ = policy_of(params.policy)
    sizes = *gib_of(params, [SEARCH], lessons), params.group_size
    return Job(file, params.run, policy, prompts, tokens, tokens, *sizes)


def _trained(files: ParamFiles, folder: str) -> CriticConfig | ValueConfig | None:
    """Return the settings of a network from the params file that trains it, None without one."""
    match = re.fullmatch(r"runs/([^/]+)/critics/([^/]+)/([^/]+)/?", folder)
    profile, run, name = match.groups() if match else ("", "", "")
    home = files.folder if profile == files.profile else profile
    path = files.base / home / f"critic-{run}.yaml"
    if not path.is_file():
        return None
    (params,) = _points(files, path)
    return params.valuing() if name == "value" else params.configs().get(name)


def jobs(
    paths: Iterable[Path | str], files: ParamFiles | None = None, served: bool = False
) -> Iterator[Job]:
    """Yield the plan of every run of params files; files of other kinds have none.

    Parameters
    ----------
    files : ParamFiles, optional
        Of their folder, with changes; by default without.
    served : bool
        As if every policy stood in a server, see `in_server`.

    Raises
    ------
    ParameterError
        For a file that holds a bad parameter; the sentence names the file.
    """
    pool = Sharing()
    for file in map(Path, paths):
        folder = file.absolute().parent  # its name is the profile
        home = files or ParamFiles(folder.name, base=folder.parent)
        try:
            for params in _points(home, file):
                training = isinstance(params, CriticParams)
                params = in_server(params) if served else params
                if params and training:
                    yield critic_job(file, params)
                elif params:
                    yield decode_job(home, file, params, pool)
        except IgcoreError as error:
            raise type(error)(f"{file}: {error}") from error


def in_server(params: DecodeParams | CriticParams) -> DecodeParams | None:
    """Return a run with its policy in a server and without the methods that read its latents.

    None where nothing is left of it: a server gives no latents to train or to ask a network with.
    """
    if isinstance(params, CriticParams):
        return None
    methods = [method for method in params.methods if network_of(method) is None]
    _, repo = policy_of(params.policy)
    policy = {"server": "http://127.0.0.1:8000/v1", "model": repo, "tokenizer": repo}
    changes = {"policy": policy, "methods": methods, "critic": None, "value": None}
    return replace(params, **changes) if methods else None


def _points(files: ParamFiles, file: Path) -> list:
    """Return the checked settings of every run of a file; none of a file of another kind."""
    settings = KINDS.get(file.stem.partition("-")[0])
    return [settings(**given) for _, given in files.points(file.absolute())] if settings else []


# --- hours ----------------------------------------------------------------------------------------


def plan_table(
    found: Iterable[Job], speeds: Mapping[tuple[str, str], float], speed: float | None = None
):
    """Return one row for every params file.

    Parameters
    ----------
    speeds : mapping of (policy, method) to float
        Tokens per second. A job has no hours (NaN) when the speed of one of its methods is unknown.
    speed : float, optional
        Tokens per second of all methods, in the place of `speeds`.

    Returns
    -------
    DataFrame
        ``file``, ``what it is`` (its first comment), ``jobs``, ``prompts`` and ``GiB`` of the
        largest job, ``million tokens`` and ``hours`` of all jobs at most, and ``drawn`` (million
        tokens) and ``hours drawn`` of what is left to them by a pool, if no block is retried.

    Raises
    ------
    ParameterError
        When pandas is not installed.
    """
    pd = needs("pandas", "study")
    rows = []
    for job in found:
        of_method = {name: speed or speeds.get((job.policy, name), math.nan) for name in job.tokens}
        first, *_ = job.file.read_text(encoding="utf-8").splitlines()
        row = {
            "file": job.file.name,
            "what it is": first.removeprefix("# "),
            "jobs": 1,
            "prompts": job.prompts,
            "million tokens": sum(job.tokens.values()) / 1e6,
            "GiB": job.gib,
            "hours": sum(job.tokens[name] / of_method[name] for name in of_method) / 3600,
            "drawn": sum(job.drawn.values()) / 1e6,
            "hours drawn": sum(job.drawn[name] / of_method[name] for name in of_method) / 3600,
        }
        rows.append(row)
    groups = pd.DataFrame(rows).groupby(["file", "what it is"], sort=False)
    table = groups.sum(skipna=False)
    largest = ["prompts", "GiB"]
    table[largest] = groups[largest].max()
    return table.reset_index()


def report(
    paths: Sequence[Path | str],
    runs: Path = Path("runs"),
    speed: float | None = None,
    served: bool = False,
):
    """Return the plan of the params files of a profile as Markdown, and how to read it.

    Parameters
    ----------
    runs : Path
        Folder whose finished runs are measured, those of the same profile.
    speed : float, optional
        Tokens per second of all methods, in the place of measured ones.
    served : bool
        As if every policy stood in a server, see `in_server`.
    """
    found = list(jobs(paths, served=served))
    if not found:
        raise ParameterError("no file has a run; give files named decode-... or critic-....yaml")
    profile = Path(paths[0]).absolute().parent.name
    table = plan_table(found, measured(runs / profile), speed)
    source = f"{speed:g} tokens per second, as given" if speed else "the speed of finished runs"
    notes = [
        table.map(_short).to_markdown(index=False, disable_numparse=True),
        "Tokens and hours are the most that a file can take. *Drawn* is what the pool leaves to "
        "it after the files above, if no block is retried, in million tokens: "
        f"{_short(table['drawn'].sum())} of {_short(table['million tokens'].sum())} in all. Hours "
        f"are tokens over {source}, without loading and training. Memory is that of weights, "
        f"networks and one prompt of {PROMPT_TOKENS} tokens; it is unknown when the shape of a "
        "model is.",
    ]
    if served:
        notes.append(served_note(found))
    if table["hours"].isna().any():
        notes.append(
            f"Hours are unknown where no finished run in {runs.name}/{profile} measures the policy "
            "and its methods. Finish one file first, or give --tokens-per-second."
        )
    return "\n\n".join(notes)


def served_note(found: Sequence[Job]) -> str:
    """Return what the servers of a plan need, and what cannot be served."""
    largest: dict[str, float] = {}
    for job in found:
        largest[job.policy] = max(job.server, largest.get(job.policy, 0.0))
    needed = ", ".join(f"{_short(gib)} GiB for {policy}" for policy, gib in largest.items())
    return (
        "Policies stand in servers and take no memory of a job, which needs GPUs for its scorers "
        "alone. A server needs the weights and the cache of one prompt with all its candidates: "
        f"{needed}. Critics, value networks and the methods that ask them are left out, because "
        "they read latents."
    )


def _short(value: object) -> object:
    """Return a number in three digits, a larger one whole."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "unknown"
    is_whole = value >= 100 or value == round(value)
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the jobs, memory and hours of params files. Nothing is started."""
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.plan", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens-per-second", type=float, help="in the place of measured speeds")
    parser.add_argument("--served", action="store_true", help="with every policy in a server")
    options = parser.parse_args(arguments)
    try:
        print(report(options.files, speed=options.tokens_per_second, served=options.served))
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
