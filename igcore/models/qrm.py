"""The reward and the cost that QRM-Llama3.1-8B gives in one pass.

A regression on the last token gives the quantiles of 19 objectives, such as helpfulness and safety.
The reward is their weighted sum, with weights that a gating network reads from the prompt. Only the
first version of the model has the objective of safety.
"""

from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..config import check_types
from ..errors import AssetError, ParameterError
from ..scorers import COST, REWARD
from .hub import snapshot
from .lm_scorer import Backbone, LMScorer
from .probe import probe
from .source import Source, digest

REPO = "nicolinho/QRM-Llama3.1-8B"
OBJECTIVES, QUANTILES = 19, 19
SAFE = 10  # the objective beavertails-is_safe, 1 where raters called an answer safe
TEMPERATURE = 5.0
# <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
TURN = (128009, 128006, 78191, 128007, 271)
KEYS = [
    "regression_layer.weight",
    "reward_transform_matrix",
    "gating.logit_scale",
    "gating.layers.9.weight",
    "gating.layers.9.bias",
    *(f"gating.layers.{i}.weight" for i in (0, 3, 6)),
    *(
        f"gating.layers.{i}.{name}"
        for i in (2, 5, 8)
        for name in ("weight", "bias", "running_mean", "running_var")
    ),
    *(f"gating.layers.{i}.num_batches_tracked" for i in (2, 5, 8)),
]


class Gate(nn.Module):
    """Weights of the objectives (R, 19) from the hidden state (R, H) where the prompt ends."""

    def __init__(self, hidden: int, width: int, temperature: float):
        """Build the layers."""
        super().__init__()
        self.temperature = temperature
        self.logit_scale = nn.Parameter(torch.ones(1))
        layers = [
            layer
            for size in (hidden, width, width)
            for layer in (nn.Linear(size, width, bias=False), nn.ReLU(), nn.BatchNorm1d(width))
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(width, OBJECTIVES))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weights of the objectives, (R, 19)."""
        return (self.layers(states) / self.temperature).softmax(-1) * self.logit_scale[0]


class Head(nn.Module):
    """The head above the language model.

    It reads (R, 2 H): the last token's hidden state and that of the prompt's end.

    Parameters
    ----------
    hidden, width : int
        Sizes of the language model and of the gating network.
    temperature : float
        Temperature of the gating network's softmax.
    """

    def __init__(self, hidden: int, width: int, temperature: float):
        """Build the layers; `_load` fills in the weights."""
        super().__init__()
        self.regression_layer = nn.Linear(hidden, OBJECTIVES * QUANTILES, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(OBJECTIVES))
        self.gating = Gate(hidden, width, temperature)

    def objectives(self, states: torch.Tensor, adjusted: bool = True) -> torch.Tensor:
        """Return the expectation of every objective, (R, 19).

        Parameters
        ----------
        adjusted : bool
            Whether the transformation that takes verbosity out is applied.
        """
        last, _ = states.chunk(2, dim=-1)
        means = self.regression_layer(last).unflatten(-1, (OBJECTIVES, QUANTILES)).mean(-1)
        return means @ self.reward_transform_matrix if adjusted else means

    def reward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the objectives, (R,)."""
        _, asked = states.chunk(2, dim=-1)
        return (self.gating(asked) * self.objectives(states)).sum(-1)

    def is_safe(self, states: torch.Tensor, adjusted: bool = True) -> torch.Tensor:
        """Return the objective of safety, (R,), near 1 for safe answers."""
        return self.objectives(states, adjusted)[:, SAFE]


@dataclass(frozen=True)
class CostOptions:
    """How the objective of safety becomes a cost; see `qrm_cost`."""

    scale: float
    threshold: float
    adjusted: bool

    def __post_init__(self):
        """Refuse a scale that is not positive."""
        check_types(self)
        if self.scale <= 0:
            raise ParameterError(
                f"parameter scale is {self.scale}; it must be above 0, or an unsafe answer would "
                "cost less"
            )


@dataclass(frozen=True)
class QRM:
    """A loaded model: what reward and cost share.

    Attributes
    ----------
    files : dict of str to str
        See `igcore.models.pretrained.contents_of`.
    """

    backbone: Backbone
    head: Head
    files: dict[str, str]

    def reward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the reward of states (R, 2 H), (R,)."""
        return self.head.reward(states)

    def cost(self, options: CostOptions, states: torch.Tensor) -> torch.Tensor:
        """Return scale * (threshold - is_safe) of states (R, 2 H), (R,)."""
        safe = self.head.is_safe(states, options.adjusted)
        return options.scale * (options.threshold - safe)


# a model stays for as long as a scorer holds `QRM.reward` or `QRM.cost`
_SHARED: WeakValueDictionary[tuple, QRM] = WeakValueDictionary()


def qrm_reward(
    *,
    repo: str = REPO,
    revision: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer:
    """Load the reward of QRM, about 0 to 1; higher is better.

    It shares model and passes with a `qrm_cost` of the same repository, dtype and device.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`.

    Raises
    ------
    ParameterError
        For a bad option, or when the chat template does not write the turns that the model was
        trained on.
    AssetError
        When files are missing, damaged, or not those of such a model.
    ScorerError
        When it does not put a helpful answer above gibberish.
    """
    qrm = _shared(Source(repo, revision, dtype, device, self_check))
    known = digest(qrm.files, qrm.backbone.template, dtype=dtype)
    scorer = LMScorer(
        "qrm-llama-3.1-8b-reward",
        qrm.backbone,
        qrm.reward,
        REWARD,
        known,
        "trained scale",
        files=qrm.files,
    )
    if self_check:
        probe(scorer, "reward")
    return scorer


def qrm_cost(
    *,
    repo: str = REPO,
    revision: str | None = None,
    scale: float = 1.0,
    threshold: float = 0.5,
    adjusted: bool = True,
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer:
    """Load the cost of QRM, scale * (threshold - is_safe); higher is worse.

    It shares model and passes with a `qrm_reward` of the same repository, dtype and device.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`.
    scale : float
        What one point of is_safe counts, above 0.
    threshold : float
        The is_safe at which the cost is 0.
    adjusted : bool
        Whether is_safe is read after the transformation that takes verbosity out of the objectives,
        as the model's published code reports it, or before.

    Raises
    ------
    ParameterError, AssetError
        See `qrm_reward`.
    ScorerError
        When it does not put an unsafe answer above a harmless one.
    """
    source = Source(repo, revision, dtype, device, self_check)
    options = CostOptions(scale, threshold, adjusted)
    qrm = _shared(source)
    known = digest(
        qrm.files,
        qrm.backbone.template,
        dtype=dtype,
        scale=float(scale),
        threshold=float(threshold),
        adjusted=adjusted,
    )
    scorer = LMScorer(
        "qrm-llama-3.1-8b-cost",
        qrm.backbone,
        partial(qrm.cost, options),
        COST,
        known,
        "trained scale",
        files=qrm.files,
    )
    if self_check:
        probe(scorer, "cost")
    return scorer


def _shared(source: Source) -> QRM:
    """Load a model, or return the one that another scorer has loaded.

    Two scorers on one backbone then share each forward pass.
    """
    folder = snapshot(source.repo, source.revision).resolve()
    key = (folder, source.dtype, source.device)
    if (qrm := _SHARED.get(key)) is None:
        qrm = _SHARED[key] = _load(source)
    return qrm


def _load(source: Source) -> QRM:
    """Load backbone and head of QRM."""
    loaded = source.load(KEYS)
    backbone = loaded.reading("chat", anchor=TURN)
    # raises when the chat template does not write what stands between prompt and answer
    backbone.prefix("")
    config = loaded.model.config
    temperature = float(getattr(config, "gating_temperature", TEMPERATURE))
    head = Head(config.hidden_size, len(loaded.tensors["gating.layers.0.weight"]), temperature)
    try:
        head.load_state_dict(loaded.tensors)
    except RuntimeError as error:
        raise AssetError(
            f"{loaded.folder} has a head of other sizes than {OBJECTIVES} objectives of "
            f"{QUANTILES} quantiles; only the first version of QRM has the objective of safety"
        ) from error
    # eval: the gate's normalisation uses the statistics of its training
    return QRM(backbone, head.to(loaded.model.device).eval(), loaded.files)
