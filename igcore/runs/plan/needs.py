"""What every run of a params file will need: models, prompts, devices and hours.

Sizes come from `shapes` and formulas from `estimate`. No weights are loaded and no network
connection is made: of a prompt set that would have to be fetched, only the published size counts.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path

import yaml

from ...beams import method_of
from ...engine.device import GIB
from ...engine.memory import batch_size
from ...errors import IgcoreError, ParameterError
from ...models.policies import POLICIES
from ...models.prompts import SPLITS, check_prompts, load_prompts
from ...models.promptsets import SOURCES, PromptOptions
from ...models.registry import check_scorer, maker, named
from ..critic_params import CriticParams
from ..decode_params import DecodeParams
from ..paramfiles import ParamFiles
from . import estimate
from .estimate import Assumed, Reader, System
from .shapes import NetworkSize, Shape, critic_size, shape, value_size

# prompt sets that would have to be fetched, by name and version -> published sizes of their
# owners' parts
HH_RLHF = {"test": 12451, "train": 112052}
SIZES: dict[tuple[str, str | None], dict[str | None, int]] = {
    ("rtp", None): {None: 623},
    ("hex-phi", None): {None: 300},
    ("pku-saferlhf", None): {"test": 759},  # as the percentages of the paper's tables have it
    ("hh-rlhf", None): HH_RLHF,
}
SHARES = {"all": 1.0} | {
    name: b - a for (_, a), (name, b) in pairwise([("", 0.0), *SPLITS.items()])
}
SEARCHED = "inferenceguard-critic"  # the method by which notebook 20 tries a critic
PARTS = {
    "keys_values": ("keys_values",),
    "logits": ("logits",),
    "sessions": ("session_0", "session_1"),
    "critic": ("critic",),
}
Span = tuple[float, float]
UNKNOWN: Span = (math.nan, math.nan)


@dataclass(frozen=True)
class Job:
    """One run and what it needs; NaN where the size of a model or a prompt set is not known.

    Attributes
    ----------
    methods : str
        Its methods or steps, in order.
    unknown : str
        Models of unknown shape.
    prompts : float
        How many are answered, or in a critic's run get rollouts.
    policy_gib, scorers_gib : float
        Weights.
    keys_values_gib, logits_gib, sessions_gib, critic_gib : float
        What the neediest method plans for one prompt: the policy's KV cache and logits, the
        scorers' sessions, and a critic or its training.
    total_gib : float
        Weights, networks and one prompt.
    fit : tuple of int
        Prompts of the neediest method that fit at a time on 1, 2, ... devices; 0 where not even one
        does.
    devices : float
        The fewest on which one prompt fits; NaN when no split of whole models over devices does.
    split : str
        Which models then share a device; each has its own where nothing fits.
    tokens, gpu_hours : tuple of float
        Tokens sampled or considered, and hours times devices: with one round in every block, and
        with all rounds.
    """

    file: str
    job: str
    policy: str
    scorers: str
    methods: str
    prompts: float
    unknown: str = ""
    policy_gib: float = math.nan
    scorers_gib: float = math.nan
    keys_values_gib: float = math.nan
    logits_gib: float = math.nan
    sessions_gib: float = math.nan
    critic_gib: float = math.nan
    total_gib: float = math.nan
    fit: tuple[int, ...] = ()
    devices: float = math.nan
    split: str = ""
    tokens: Span = UNKNOWN
    gpu_hours: Span = UNKNOWN


@dataclass(frozen=True)
class Models:
    """The models of a run: names, and shapes as far as they are known."""

    policy: str
    scorers: str
    shape: Shape | None
    readers: tuple[Reader, ...]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, params: DecodeParams | CriticParams) -> "Models":
        """Return the models that parameters name; scorers that share weights share a reader."""
        name, _ = named(params.policy, "policy", ("template", "revision"))
        known = POLICIES.get(name)
        policy = shape((known.repo or known.asset) if known else name, params.dtype, head=True)
        # scorers that read with the same weights share them
        roles: dict[tuple[str, str], list[str]] = {}
        names = []
        for role in ("reward", "cost"):
            scorer, options = check_scorer(getattr(params, role), f"{role} scorer")
            names.append(scorer)
            given = {
                key: option.default for key, option in signature(maker(scorer)).parameters.items()
            } | options
            if "repo" in given:  # the embedded scorers have none, and weigh next to nothing
                roles.setdefault((given["repo"], given["dtype"]), []).append(role)
        shapes = {key: shape(*key, head=False) for key in roles}
        unknown = [name] * (policy is None) + [
            repo for (repo, _), found in shapes.items() if found is None
        ]
        readers = [
            Reader(found, tuple(roles[key])) for key, found in shapes.items() if found is not None
        ]
        return cls(name, ", ".join(names), policy, tuple(readers), tuple(unknown))


def count(prompts: str | Mapping, split: str, limit: int | None) -> float:
    """Return how many prompts a run takes, NaN where that is not known.

    A set that would have to be fetched is not fetched for it.
    """
    source, options = check_prompts(prompts)
    fetched = source in SOURCES or (source, None) in SIZES
    size = published(source, options, split) if fetched else len(load_prompts(prompts, split))
    if size is None:
        return math.nan if limit is None else limit
    return size if limit is None else min(size, limit)


def published(source: str, options: PromptOptions, split: str) -> int | None:
    """Return roughly how many prompts a split of a set on the hub has, None if unknown.

    It follows the rules of `igcore.load_prompts`.
    """
    parts = SIZES.get((source, None), {})
    part, share = options.part, SHARES[split]
    if part is None and None not in parts:  # its owners' test part is a split of its own
        part, share = (
            ("test", 1.0)
            if split in ("all", "test")
            else ("train", share + SHARES["test"] * (split == "train"))
        )
    return round(parts[part] * share) if part in parts else None


def decode_job(file: Path, params: DecodeParams, assumed: Assumed) -> Job:
    """Return the plan of a run of notebook 30."""
    models, prompts, config = (
        Models.of(params),
        count(params.prompts, params.split, params.limit),
        params.search(),
    )
    job = Job(
        str(file), params.run, models.policy, models.scorers, ", ".join(params.methods), prompts
    )
    asking = any(method_of(method).asks_critic for method in params.methods)
    critics, _ = _made(file, params.critic)
    unknown = [*models.unknown, *([params.critic] if asking and not critics else [])]
    if unknown:
        return replace(job, unknown=", ".join(unknown))
    networks = [critic_size(models.shape, critic) for critic in critics]
    system = System(models.shape, models.readers, networks[0] if networks else None)
    networks += [value_size(models.shape, value) for value in _made(file, params.value)[1]]
    needed = {
        method: estimate.prompt_bytes(system, method, config, assumed) for method in params.methods
    }
    job, devices, most = _placed(job, system, networks, needed, assumed)
    if math.isnan(prompts):
        return job
    if params.memory_gb is not None:
        most = {
            method: min(n, batch_size(sum(needed[method].values()), 0, params.memory_gb))
            for method, n in most.items()
        }
    times = [
        estimate.decode_s(system, method, config, prompts, most[method], assumed)
        for method in params.methods
    ]
    return _timed(
        job, devices, [estimate.drawn(method, config, prompts) for method in params.methods], times
    )


def critic_job(file: Path, params: CriticParams, assumed: Assumed) -> Job:
    """Return the plan of a run of notebook 20: rollouts, training, and the trial search."""
    models, value = Models.of(params), params.valuing()
    learn, test = (
        count(params.prompts, *given)
        for given in (("train", params.limit), ("test", params.test_limit))
    )
    steps = [f"critic {name} ({critic.features})" for name, critic in params.configs().items()]
    steps = [
        *([] if params.rollouts else ["rollouts"]),
        *steps,
        *(["value network"] if value else []),
        "search",
    ]
    job = Job(str(file), params.run, models.policy, models.scorers, ", ".join(steps), learn + test)
    if models.unknown:
        return replace(job, unknown=", ".join(models.unknown))
    lessons = [(critic_size(models.shape, critic), critic) for critic in params.configs().values()]
    lessons += [(value_size(models.shape, value), value)] if value else []
    system, length = System(models.shape, models.readers, lessons[0][0]), params.max_new_tokens
    needed = {SEARCHED: estimate.prompt_bytes(system, SEARCHED, params.searching(), assumed)}
    training = max(estimate.training_bytes(models.shape, *lesson, length) for lesson in lessons)
    needed["training"] = dict.fromkeys(needed[SEARCHED], 0) | {"critic": training}
    job, devices, most = _placed(job, system, [network for network, _ in lessons], needed, assumed)
    tried = [count(params.prompts, "calibrate", None)] * len(params.thresholds)
    if math.isnan(searched := sum([min(params.search_limit, test), *tried])) or math.isnan(learn):
        return job
    times = [
        estimate.decode_s(system, SEARCHED, params.searching(), searched, most[SEARCHED], assumed)
    ]
    tokens = [estimate.drawn(SEARCHED, params.searching(), searched)]
    if not params.rollouts:
        times += [(estimate.rollouts_s(system, params, n, assumed),) * 2 for n in (learn, test)]
        tokens += [((learn + test) * params.n_rollouts * length,) * 2]
    for network, lesson in lessons:
        rollouts = min(learn, getattr(lesson, "n_prompts", None) or learn) * params.n_rollouts
        times.append(estimate.training_s(models.shape, network, lesson, rollouts, length, assumed))
    return _timed(job, devices, tokens, times)


def _made(file: Path, folder: str | None) -> tuple[list, list]:
    """Return the settings of the critics and value networks in a folder that a run reads.

    They come from the params file that makes the folder; the lists are empty when there is none.
    """
    _, profile, _, run, name = [*Path(folder or "").parts, *[""] * 5][:5]
    made = file.parent.parent / profile / f"critic-{run}.yaml"
    if not made.is_file():
        return [], []
    (params,) = _runs(made, CriticParams)
    value = params.valuing()
    critics = [critic for key, critic in params.configs().items() if key == name]
    return critics, [value] if value else []


def _total(needs: Mapping[str, int]) -> int:
    """Return the sum of needs in bytes."""
    return sum(needs.values())


def _placed(
    job: Job,
    system: System,
    networks: Sequence[NetworkSize],
    needed: Mapping[str, dict],
    assumed: Assumed,
) -> tuple[Job, int, dict[str, int]]:
    """Return the job with its memory, the number of devices, and the prompts that fit at a time.

    The last is a number for each of `needed`.
    """
    fixed = sum(4 * network.parameters for network in networks)
    worst = max(needed.values(), key=_total)
    found = list(estimate.splits(system, fixed, worst, assumed.device))
    fit = tuple(n for n, _ in found)
    place = next((place for n, place in found if n), tuple(range(len(found))))
    names = ["policy", *(" + ".join(reader.roles) for reader in system.readers)]
    together = [
        " + ".join(name for name, at in zip(names, place, strict=True) if at == here)
        for here in sorted(set(place))
    ]
    weights = [system.policy.weights, sum(reader.shape.weights for reader in system.readers)]
    sums = {
        f"{name}_gib": sum(worst.get(part, 0) for part in parts) / GIB
        for name, parts in PARTS.items()
    }
    job = replace(
        job,
        policy_gib=weights[0] / GIB,
        scorers_gib=weights[1] / GIB,
        fit=fit,
        split=", ".join(together),
        devices=len(together) if any(fit) else math.nan,
        total_gib=(sum(weights) + fixed + _total(worst)) / GIB,
        **sums,
    )
    loads = {method: estimate.loads(system, fixed, needs) for method, needs in needed.items()}
    return (
        job,
        len(together),
        {
            method: max(1, estimate.fitting(*load, place, assumed.device))
            for method, load in loads.items()
        },
    )


def _timed(job: Job, devices: int, tokens: Sequence[Span], seconds: Sequence[Span]) -> Job:
    """Return the job with the sums over its steps.

    Models on several devices work one after another, so hours count for every device.
    """
    low, high = (devices * sum(part) / 3600 for part in zip(*seconds, strict=True))
    return replace(
        job, tokens=tuple(sum(part) for part in zip(*tokens, strict=True)), gpu_hours=(low, high)
    )


# first word of a params file's name -> its parameters and its plan
KINDS = {"decode": (DecodeParams, decode_job), "critic": (CriticParams, critic_job)}


def jobs(files: Sequence[Path | str], assumed: Assumed) -> list[Job]:
    """Return the plan of every run of params files, one for every point of a grid.

    Files of other kinds have none.

    Raises
    ------
    ParameterError, AssetError
        For a file that is missing, no params file, or holds a bad parameter, and for a damaged
        ``config.json``; the sentence begins with the name of the params file.
    """
    found = []
    for file in map(Path, files):
        if (kind := file.stem.split("-")[0]) in KINDS:
            cls, plan = KINDS[kind]
            with _of(file):
                found += [plan(file, params, assumed) for params in _runs(file, cls)]
    return found


def _runs(file: Path, cls: type) -> list:
    """Return the checked settings of every run of a file."""
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(
            f"{file} cannot be read ({error.strerror}); check the path, seen from {Path.cwd()}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"{file} is no YAML ({' '.join(str(error).split())}); mend it"
        ) from error
    if not isinstance(given, Mapping) or not isinstance(given.get("run"), str):
        raise ParameterError(
            f"{file} is no params file; it must be a mapping of settings, with the name of the run "
            "as run"
        )
    # a relative path may lack the name of its folder, which is the profile
    file = Path(os.path.abspath(file))
    return [
        cls(**run) for _, run in ParamFiles(file.parent.name, base=file.parent.parent).points(file)
    ]


@contextmanager
def _of(file: Path) -> Iterator[None]:
    """Put the name of the file before the message of an error."""
    try:
        yield
    except IgcoreError as error:
        raise type(error)(f"{file}: {error}") from error
