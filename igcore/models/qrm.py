"""The reward and the cost that QRM-Llama3.1-8B gives in one pass.

A regression on the last token gives the quantiles of 19 objectives, such as helpfulness and safety.
The reward is their weighted sum, with weights that a gating network reads from the prompt. Only the
first version of the model has the objective of safety.
"""

from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from torch import nn

from ..scorers import COST, REWARD
from ..settings import settings
from .lm_scorer import Backbone, LMScorer
from .pretrained import contents_of, one_sentence
from .source import Checkpoint

OBJECTIVES, QUANTILES = 19, 19
THRESHOLD = 0.5  # the is_safe at which the cost is 0
SAFE = 10  # the objective beavertails-is_safe, 1 where raters called an answer safe
TEMPERATURE = 5.0
# <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
TURN = (128009, 128006, 78191, 128007, 271)


class Gate(nn.Module):
    """Weights of the objectives (R, 19) from the hidden state (R, H) where the prompt ends."""

    def __init__(self, hidden: int, width: int, temperature: float):
        """Build the layers."""
        super().__init__()
        self.temperature = temperature
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.layers = nn.Sequential()
        for size in (hidden, width, width):
            self.layers.append(nn.Linear(size, width, bias=False))
            self.layers.append(nn.ReLU())
            self.layers.append(nn.BatchNorm1d(width))
        self.layers.append(nn.Linear(width, OBJECTIVES))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weights of the objectives, (R, 19)."""
        logits = self.layers(states) / self.temperature
        return logits.softmax(-1) * self.logit_scale[0]


class Head(nn.Module):
    """The head above the language model.

    It reads (R, 2 H): the last token's hidden state and that of the prompt's end.

    Parameters
    ----------
    hidden, width : int
        Sizes of the language model and of the gating network.
    temperature : float
        Temperature of the gating network's softmax.

    Attributes
    ----------
    backbone : Backbone
        The language model.
    files : mapping of str to str
        See `igcore.models.pretrained.contents_of`.
    """

    backbone: Backbone
    files: Mapping[str, str]

    def __init__(self, hidden: int, width: int, temperature: float = TEMPERATURE):
        """Build the layers; `_load` fills in the weights."""
        super().__init__()
        self.regression_layer = nn.Linear(hidden, OBJECTIVES * QUANTILES, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(OBJECTIVES))
        self.gating = Gate(hidden, width, temperature)

    def objectives(self, states: torch.Tensor) -> torch.Tensor:
        """Return the expectation of every objective, (R, 19).

        The transformation takes verbosity out of the objectives, as in the model's published code.
        """
        last, _ = states.chunk(2, dim=-1)
        quantiles = self.regression_layer(last).unflatten(-1, (OBJECTIVES, QUANTILES))
        return quantiles.mean(-1) @ self.reward_transform_matrix

    def reward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the objectives, (R,)."""
        _, prompt_end = states.chunk(2, dim=-1)
        weighted = self.gating(prompt_end) * self.objectives(states)
        return weighted.sum(-1)

    def cost(self, states: torch.Tensor) -> torch.Tensor:
        """Return 0.5 - is_safe, (R,); is_safe is near 1 for safe answers."""
        return THRESHOLD - self.objectives(states)[:, SAFE]


# a model stays for as long as a scorer holds `Head.reward` or `Head.cost`
_SHARED: WeakValueDictionary[tuple, Head] = WeakValueDictionary()


@settings(kw_only=True)
class QRM(Checkpoint):
    """What reward and cost of QRM share: two scorers on one backbone share each forward pass."""

    repo: str = "nicolinho/QRM-Llama3.1-8B"

    def head(self) -> Head:
        """Return head and backbone, loaded or those that another scorer has loaded."""
        key = (self.folder.resolve(), self.dtype, self.device)
        head = _SHARED.get(key)
        if head is None:
            head = self._load()
            _SHARED[key] = head
        return head

    def _load(self) -> Head:
        """Load backbone and head."""
        with torch.device("meta"):  # names without numbers
            keys = sorted(Head(1, 1).state_dict())
        model, tensors = self.model(heads=keys)
        width = len(tensors["gating.layers.0.weight"])
        temperature = getattr(model.config, "gating_temperature", TEMPERATURE)
        head = Head(model.config.hidden_size, width, float(temperature))
        # other sizes are refused: only the first version of QRM has the objective of safety
        with one_sentence(self.folder):
            head.load_state_dict(tensors)
        head.backbone = self.backbone(model, "chat", anchor=TURN)
        # raises when the chat template does not write what stands between prompt and answer
        head.backbone.prefix("")
        head.files = contents_of(self.folder)
        # eval: the gate's normalisation uses the statistics of its training
        return head.to(model.device).eval()


@settings(kw_only=True)
class QRMReward(QRM):
    """The reward of QRM, about 0 to 1; higher is better.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Checkpoint`.
    """

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        head = self.head()
        name = "qrm-llama-3.1-8b-reward"
        return self.lm_scorer(name, REWARD, head.backbone, head.reward, files=head.files)


@settings(kw_only=True)
class QRMCost(QRM):
    """The cost of QRM, 0.5 - is_safe; higher is worse.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Checkpoint`.
    """

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        head = self.head()
        formula = {"scale": 1.0, "threshold": THRESHOLD, "adjusted": True}
        name = "qrm-llama-3.1-8b-cost"
        return self.lm_scorer(name, COST, head.backbone, head.cost, files=head.files, **formula)
