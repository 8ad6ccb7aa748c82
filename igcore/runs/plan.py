"""The plan of a profile before it starts: jobs, tokens, memory, and hours at a measured speed.

``python -m igcore.runs.plan FILE.yaml ...`` prints it. Memory comes from the sizes in a model's
configuration and the engine's own formulas. Hours are the tokens to sample over tokens per second;
the speed is measured from finished runs or given. Without a speed there are no hours. No weights
are loaded and nothing is downloaded.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from ..baselines.re_control import ValueNetwork, ValueSpec
from ..baselines.value_training import ValueConfig
from ..beams import method_of, settings_of
from ..config import SearchConfig
from ..critic.config import CriticConfig
from ..critic.network import Critic
from ..critic.spec import Spec
from ..critic.training import names_of
from ..engine.device import GIB
from ..engine.memory import CRITIC_ROWS, critic_bytes, kv_bytes, search_bytes, session_bytes
from ..errors import IgcoreError, ParameterError, needs
from ..models.policies import POLICIES
from ..models.pretrained import DTYPES
from ..models.registry import check_scorer, maker, named
from .counting import count
from .critic_params import CriticParams
from .decode_params import DecodeParams
from .paramfiles import ParamFiles
from .rollout_run import METHOD as ROLLOUTS
from .sharing import Sharing, measured

# name on the hub, or of an asset -> fields of its LlamaConfig
SHAPES = json.loads((files("igcore.models") / "data/shapes.json").read_text(encoding="utf-8"))
KINDS = {"critic": CriticParams} | dict.fromkeys(("decode", "examples", "regime"), DecodeParams)
SEARCH = "inferenceguard-critic"  # the method by which notebook 20 tries a critic
TRAINING = 4 * 4  # bytes of a parameter, its gradient and two moments of AdamW, in float32
PROMPT_TOKENS = 512  # length of the longest prompt, for memory


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

    @property
    def gib(self) -> float:
        """Return the GiB without which the run cannot do one prompt."""
        return self.weights + self.prompt


# --- sizes ----------------------------------------------------------------------------------------


def config_of(repo: str):
    """Return the configuration of a model, None when it is not known.

    It comes from `SHAPES`, or from a local folder.
    """
    if repo in SHAPES:
        return LlamaConfig(**SHAPES[repo])
    folder = Path(repo).expanduser()
    if not (folder / "config.json").is_file():
        return None
    return AutoConfig.from_pretrained(folder, local_files_only=True)


@cache
def model_of(repo: str, dtype: str, head: bool):
    """Return a model without weights, on torch's meta device; None when its shape is unknown.

    A policy has a head over the vocabulary, the backbone of a scorer has none.
    """
    config = config_of(repo)
    if config is None:
        return None
    kind = AutoModelForCausalLM if head else AutoModel
    with torch.device("meta"):
        return kind.from_config(config, dtype=DTYPES[dtype])


def weight_bytes(model) -> int:
    """Return the bytes of a model's weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


def network_of(policy, config: CriticConfig | ValueConfig) -> Critic | ValueNetwork:
    """Return a critic or value network of this policy without weights."""
    text = policy.config.get_text_config(decoder=True)
    nobody = SimpleNamespace(name="", digest="")  # the size of a network does not depend on names
    sizes = names_of(nobody, nobody, nobody)
    sizes |= {"max_new_tokens": 1, "hidden": text.hidden_size, "width": config.width}
    with torch.device("meta"):
        if isinstance(config, ValueConfig):
            return ValueNetwork(ValueSpec(**sizes))
        layers = text.num_hidden_layers
        kv_width = kv_bytes(policy, 1, 1, 0, 0) // (layers * policy.dtype.itemsize)
        learned = asdict(config) | {"budget_high": config.budget}
        common = {name: learned[name] for name in learned.keys() & Spec.__dataclass_fields__}
        return Critic(Spec(**common | sizes, n_layers=layers, kv_width=kv_width))


def policy_of(policy: str | Mapping) -> tuple[str, str]:
    """Return a policy's name as records have it, and the repository, asset or folder that it is."""
    name, _ = named(policy, "policy", ("template", "revision"))
    if known := POLICIES.get(name):
        return name, known.repo or known.asset
    return Path(name).name, name


def models_of(params: DecodeParams | CriticParams) -> list:
    """Return the policy and the scorers' models without weights, None for an unknown one.

    Scorers that read the same weights share a model. An embedded scorer weighs next to nothing.
    """
    _, repo = policy_of(params.policy)
    backbones = {}
    for scorer in (params.reward, params.cost):
        scorer_name, options = check_scorer(scorer)
        make = maker(scorer_name)
        if hasattr(make, "load"):  # a checkpoint of the hub
            checkpoint = make(**options)
            key = checkpoint.repo, checkpoint.dtype
            backbones[key] = model_of(*key, head=False)
    return [model_of(repo, params.dtype, True), *backbones.values()]


# --- jobs -----------------------------------------------------------------------------------------


def most_tokens(method: str, config: SearchConfig) -> int:
    """Return the most tokens that a method samples or considers for one prompt."""
    settings = settings_of(method, config)
    return settings.n_samples * settings.max_new_tokens * settings.rounds


def prompt_bytes(models: Sequence, networks: Sequence, method: str, config: SearchConfig) -> int:
    """Return the bytes that a method plans for one prompt, by `igcore.engine.memory`."""
    settings = settings_of(method, config)
    policy, *scorers = models
    total = search_bytes(policy, settings, PROMPT_TOKENS, "shared")
    for model in scorers:
        total += session_bytes(model, settings, PROMPT_TOKENS, "shared")
    if method_of(method).asks_critic and networks[0].reads_keys:
        rows = min(CRITIC_ROWS, settings.n_samples)
        prompt = PROMPT_TOKENS if networks[0].reads_prompt else 0
        total += critic_bytes(policy, rows, prompt + settings.max_new_tokens)
    return total


def gib_of(
    params: DecodeParams | CriticParams, methods: Sequence[str], lessons: Sequence
) -> tuple[float, float]:
    """Return the GiB of weights and of one prompt, NaN when a model or a network is unknown.

    Parameters
    ----------
    lessons : sequence of CriticConfig, ValueConfig or None
        Settings of its networks, a critic first. A run of notebook 20 trains them.
    """
    models = models_of(params)
    if None in [*models, *lessons]:
        return math.nan, math.nan
    networks = [network_of(models[0], lesson) for lesson in lessons]
    training = isinstance(params, CriticParams)
    config = params.searching() if training else params.search()
    peaks = [prompt_bytes(models, networks, method, config) for method in methods]
    for network, lesson in zip(networks, lessons, strict=True):
        if training:
            rows = lesson.batch_size if getattr(network, "reads_keys", False) else 0
            prompt = PROMPT_TOKENS if getattr(network, "reads_prompt", False) else 0
            batch = critic_bytes(models[0], rows, prompt + params.max_new_tokens)
            peaks.append(TRAINING * network.parameter_count + batch)
    weights = sum(map(weight_bytes, [*models, *networks]))
    return weights / GIB, max(peaks) / GIB


def decode_job(files: ParamFiles, file: Path, params: DecodeParams, pool: Sharing) -> Job:
    """Return the plan of a run of notebook 30, after the runs that a pool has seen."""
    folders = [folder for folder in (params.critic, params.value) if folder]
    lessons = [_trained(files, folder) for folder in folders]
    prompts = count(params.prompts, params.split, params.limit)
    config = params.search()
    tokens = {method: prompts * most_tokens(method, config) for method in params.methods}
    drawn = {method: prompts * pool.drawn(params, method) for method in params.methods}
    policy, _ = policy_of(params.policy)
    sizes = *gib_of(params, params.methods, lessons), params.group_size
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


def jobs(paths: Iterable[Path | str], files: ParamFiles | None = None) -> Iterator[Job]:
    """Yield the plan of every run of params files; files of other kinds have none.

    Parameters
    ----------
    files : ParamFiles, optional
        Of their folder, with changes; by default without.

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
                yield critic_job(file, params) if training else decode_job(home, file, params, pool)
        except IgcoreError as error:
            raise type(error)(f"{file}: {error}") from error


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


def report(paths: Sequence[Path | str], runs: Path = Path("runs"), speed: float | None = None):
    """Return the plan of the params files of a profile as Markdown, and how to read it.

    Parameters
    ----------
    runs : Path
        Folder whose finished runs are measured, those of the same profile.
    speed : float, optional
        Tokens per second of all methods, in the place of measured ones.
    """
    found = list(jobs(paths))
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
    if table["hours"].isna().any():
        notes.append(
            f"Hours are unknown where no finished run in {runs.name}/{profile} measures the policy "
            "and its methods. Finish one file first, or give --tokens-per-second."
        )
    return "\n\n".join(notes)


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
    options = parser.parse_args(arguments)
    try:
        print(report(options.files, speed=options.tokens_per_second))
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
