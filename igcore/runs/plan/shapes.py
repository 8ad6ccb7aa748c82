"""Models without weights: sizes on torch's meta device, where tensors have a shape but no content.

Shapes come from the table `SHAPES` of published configurations or from a local ``config.json``;
nothing is downloaded or loaded.
"""

import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from ...baselines.re_control import ValueNetwork, ValueSpec
from ...baselines.value_training import ValueConfig
from ...config import SearchConfig
from ...critic.config import CriticConfig
from ...critic.latent import Latents, latents
from ...critic.network import Critic
from ...critic.spec import Spec
from ...engine.memory import kv_bytes, search_bytes, session_bytes
from ...errors import AssetError
from ...models.hub import MIRROR
from ...models.pretrained import DTYPES

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
LLAMA_2 = LLAMA | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32}
LLAMA_3 = LLAMA | {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
SHAPES: dict[str, dict] = {  # name on the hub, or of an asset, -> fields of its LlamaConfig
    "PKU-Alignment/alpaca-7b-reproduced": LLAMA_2 | {"vocab_size": 32001},
    "PKU-Alignment/beaver-7b-v3.0": LLAMA_2 | {"vocab_size": 32001},
    "lmsys/vicuna-7b-v1.5": LLAMA_2,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3,
    "argsearch/llama-7b-rm-float32": LLAMA_2,
    "PKU-Alignment/beaver-7b-unified-cost": LLAMA_2 | {"vocab_size": 32001},
    "nicolinho/QRM-Llama3.1-8B": LLAMA_3 | {"vocab_size": 128257},
    "smollm2": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "intermediate_size": 1536,
        "num_key_value_heads": 3,
    },
}
TRIED = 8  # number of tokens on which the operations of a network are counted
NOBODY = dict.fromkeys(
    ("policy", "policy_digest", "cost", "cost_digest", "reward", "reward_digest"), ""
)


def config_of(repo: str):
    """Return the configuration of a model, or None when its shape is not known here.

    It comes from `SHAPES`, from a local folder, or from the mirror of the hub.

    Raises
    ------
    AssetError
        When transformers cannot read a ``config.json`` that is there.
    """
    if repo in SHAPES:
        return LlamaConfig(**SHAPES[repo])
    folders = [Path(repo).expanduser(), Path(os.environ.get(MIRROR) or ".").expanduser() / repo]
    folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if folder is None:
        return None
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise AssetError(
            f"{folder / 'config.json'} cannot be read ({reason}); fetch or save the whole model "
            "again"
        ) from error


@dataclass(frozen=True, eq=False)
class Shape:
    """A language model without its weights.

    Attributes
    ----------
    model
        A transformers model on the meta device.
    cache : str
        How the engine stores its KV cache, a key of `igcore.engine.local.CACHES`. A plain model is
        assumed to fit the shared cache: without weights nothing can be tried.
    """

    model: object

    @cached_property
    def cache(self) -> str:
        """The engine's KV cache for this model, a key of `igcore.engine.local.CACHES`."""
        plain = all(
            type(layer) is DynamicLayer for layer in DynamicCache(config=self.model.config).layers
        )
        return "shared" if plain else "dynamic"

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(p.nbytes for p in self.model.parameters())

    @cached_property
    def multiplied(self) -> int:
        """Number of weights that every token is multiplied by.

        A table of embeddings that is only looked up does not count.
        """
        table, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        looked_up = 0 if head is not None and head.weight is table else table.numel()
        return sum(p.numel() for p in self.model.parameters()) - looked_up

    @cached_property
    def token(self) -> int:
        """Bytes of one token in the KV cache."""
        return kv_bytes(self.model, 1, 1, 0, 0)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    @cached_property
    def config(self):
        """The settings of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    def held(self, prompts: int, rows: int, prompt_tokens: int, tokens: int) -> int:
        """Return how many tokens a KV cache holds.

        The shared cache holds a prompt once, transformers' own cache in every row.
        """
        return (prompts if self.cache == "shared" else rows) * prompt_tokens + rows * tokens

    def search_bytes(self, settings: SearchConfig, prompt_tokens: int) -> int:
        """Return the memory of a search, see `igcore.engine.memory.search_bytes`."""
        return search_bytes(self.model, settings, prompt_tokens, self.cache)

    def session_bytes(self, settings: SearchConfig, prompt_tokens: int) -> int:
        """Return the memory of a scorer's session, see `igcore.engine.memory.session_bytes`."""
        return session_bytes(self.model, settings, prompt_tokens, self.cache)

    def logits_bytes(self, settings: SearchConfig) -> int:
        """Return the part of `search_bytes` that is logits, which remains without any KV cache."""
        return settings.n_samples * getattr(self.config, "vocab_size", 0) * self.dtype.itemsize


@cache
def shape(repo: str, dtype: str, head: bool) -> Shape | None:
    """Return the shape of a model by its name on the hub or its folder, None when unknown.

    Parameters
    ----------
    dtype : str
        A key of `igcore.models.pretrained.DTYPES`.
    head : bool
        Whether it is a policy, with a head over the vocabulary, or the backbone of a scorer.
    """
    config = config_of(repo)
    if config is None:
        return None
    with torch.device("meta"):
        return Shape(
            (AutoModelForCausalLM if head else AutoModel).from_config(config, dtype=DTYPES[dtype])
        )


@dataclass(frozen=True)
class NetworkSize:
    """The size of a network that learns from rollouts.

    Attributes
    ----------
    features : str
        What it reads, a key of `igcore.critic.latent.FEATURES`.
    parameters : int
        Number of parameters, in float32.
    operations : float
        Floating-point operations for one token: a multiplication and an addition are two.
    layers : int
        Layers of the policy that must run for its features.
    """

    features: str
    parameters: int
    operations: float
    layers: int

    @property
    def reads_keys(self) -> bool:
        """Whether it reads the policy's keys and values."""
        return "h" in self.features


@cache
def critic_size(policy: Shape, config: CriticConfig) -> NetworkSize:
    """Return the size of a critic of this policy; its operations are counted, not derived."""
    of = policy.config
    heads, hidden, n = of.num_key_value_heads, of.hidden_size, of.num_hidden_layers
    d = getattr(of, "head_dim", None) or hidden // of.num_attention_heads
    spec = Spec(
        **NOBODY,
        max_new_tokens=1,
        hidden=hidden,
        width=config.width,
        accounting=config.accounting,
        budget=config.budget,
        gamma_safety=config.gamma_safety,
        budget_high=config.budget,
        gamma_task=config.gamma_task,
        features=config.features,
        layer=config.layer,
        use_z=config.use_z,
        n_layers=n,
        kv_width=2 * heads * d,
    )
    with torch.device("meta"):
        critic, states = Critic(spec), torch.zeros(1, TRIED, hidden)
        keys = [torch.zeros(1, heads, TRIED, d)] * n
        states = Latents(torch.ones(1, TRIED, dtype=torch.bool), states, states, keys, keys)
        with FlopCounterMode(display=False) as counter:
            critic(latents(states, config.features), torch.zeros(1, TRIED))
    layers = n if config.layer is None or config.features != "m" else config.layer + 1
    return NetworkSize(
        config.features, critic.parameter_count, counter.get_total_flops() / TRIED, layers
    )


def value_size(policy: Shape, config: ValueConfig) -> NetworkSize:
    """Return the size of a value network of this policy.

    Its layers multiply every token by every weight, which is two operations each.
    """
    with torch.device("meta"):
        network = ValueNetwork(
            ValueSpec(
                **NOBODY, max_new_tokens=1, hidden=policy.config.hidden_size, width=config.width
            )
        )
    return NetworkSize(
        "o", network.parameter_count, 2 * network.parameter_count, policy.config.num_hidden_layers
    )
