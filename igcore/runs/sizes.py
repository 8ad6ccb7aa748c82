"""The memory of a run before it starts: models without weights, and the engine's own formulas.

Sizes come from a model's configuration. No weights are loaded and nothing is downloaded.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from ..models.policies import OPTIONS, POLICIES
from ..models.pretrained import DTYPES
from ..models.registry import check_scorer, maker, named
from .critic_params import CriticParams
from .decode_params import DecodeParams

# name on the hub, or of an asset -> fields of its LlamaConfig
SHAPES = json.loads((files("igcore.models") / "data/shapes.json").read_text(encoding="utf-8"))
TRAINING = 4 * 4  # bytes of a parameter, its gradient and two moments of AdamW, in float32
PROMPT_TOKENS = 512  # length of the longest prompt, for memory


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
    if is_served(policy):
        return policy["model"], policy["model"]
    name, _ = named(policy, "policy", OPTIONS)
    if known := POLICIES.get(name):
        return name, known.repo or known.asset
    return Path(name).name, name


def is_served(policy: str | Mapping) -> bool:
    """Say whether a policy stands in a server, and nothing of it in the memory of a run."""
    return isinstance(policy, Mapping) and "server" in policy


def models_of(params: DecodeParams | CriticParams) -> list:
    """Return the policy and the scorers' models without weights, None for an unknown one.

    So is a policy in a server. Scorers that read the same weights share a model. An embedded scorer
    weighs next to nothing, and one behind an endpoint nothing here.
    """
    _, repo = policy_of(params.policy)
    backbones = {}
    scorers = [scorer for scorer in (params.reward, params.cost) if scorer is not None]
    while scorers:
        scorer_name, options = check_scorer(scorers.pop(0))
        scorers += options.get("costs", [])  # of a maximum
        make = maker(scorer_name)
        checkpoint = make(**options) if hasattr(make, "load") else None
        if hasattr(checkpoint, "repo"):  # of the hub
            key = checkpoint.repo, checkpoint.dtype
            backbones[key] = model_of(*key, head=False)
    policy = None if is_served(params.policy) else model_of(repo, params.dtype, True)
    return [policy, *backbones.values()]


def prompt_bytes(models: Sequence, networks: Sequence, method: str, config: SearchConfig) -> int:
    """Return the bytes that a method plans for one prompt, by `igcore.engine.memory`."""
    settings = settings_of(method, config)
    policy, *scorers = models
    total = search_bytes(policy, settings, PROMPT_TOKENS, "shared") if policy is not None else 0
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
    here = models[1:] if is_served(params.policy) and not lessons else models
    if None in [*here, *lessons]:
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
    weights = sum(map(weight_bytes, [*here, *networks]))
    return weights / GIB, max(peaks) / GIB


def server_gib(params: DecodeParams) -> float:
    """Return the GiB of a served policy with one prompt; 0 for another, NaN where not known."""
    if not is_served(params.policy):
        return 0.0
    _, repo = policy_of(params.policy)
    policy = model_of(repo, params.dtype, True)
    if policy is None:
        return math.nan
    settings = [settings_of(method, params.search()) for method in params.methods]
    caches = [search_bytes(policy, each, PROMPT_TOKENS, "shared") for each in settings]
    return (weight_bytes(policy) + max(caches)) / GIB
