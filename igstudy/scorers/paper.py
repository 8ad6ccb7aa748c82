"""The reward and cost models of the paper: llama-7b-rm of ARGS, beaver-7b-cost of Safe RLHF, QRM.

Do not load the files of the second with transformers' class for sequence classification: it accepts
them and puts a random head in the place of theirs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from igcore.errors import AssetError, ParameterError
from igcore.models.backbone import Backbone
from igcore.models.lm_scorer import Checkpoint, HeadFunction, LMScorer
from igcore.models.pretrained import contents_of, one_sentence
from igcore.scorers import COST, REWARD
from igcore.settings import settings

from .. import templates as templates  # has that of Beaver

# --- llama-7b-rm: a Llama with a linear head at its last token ------------------------------------

USER = re.compile("human:", re.IGNORECASE)


@settings(kw_only=True)
class LlamaReward(Checkpoint):
    """A ``LlamaForSequenceClassification`` with one output; higher is better.

    The number of labels is that of the head itself, because transformers assumes two when the
    configuration names none. No end token is appended, as in ARGS. The model was trained on
    dialogues of Human and Assistant, in which an answer is read as ARGS reads it, up to where it
    goes on with "human:" in the user's place.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    """

    repo: str = "argsearch/llama-7b-rm-float32"

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        model, tensors = self.model(heads=["score.weight"])
        backbone = self.backbone(model, "human-assistant")
        # not in the template itself: a cost has to read everything
        backbone.template = partial(_first_turn, backbone.template)
        head = single(self.folder, model, tensors, "score")
        options = {"text_format": "human-assistant"}
        return self.made(LMScorer, "llama-7b-rm", REWARD, backbone, head, options)


def _first_turn(whole: Callable[[str, str], str], prompt: str, answer: str) -> str:
    """Write a pair, its answer cut where a user would speak again."""
    return whole(prompt, USER.split(answer)[0])


def single(
    folder: Path, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], name: str
) -> HeadFunction:
    """Return the linear layer `name`, (R, H) to (R, 1) in float32, with its bias if any.

    Raises
    ------
    AssetError
        When it has more than one output.
    """
    with one_sentence(folder):
        weight = tensors[f"{name}.weight"].reshape(1, model.config.hidden_size)
    weight, bias = weight.float().to(model.device), tensors.get(f"{name}.bias")
    bias = bias if bias is None else bias.float().to(model.device)
    return partial(linear, weight=weight, bias=bias)


# --- beaver-7b-cost: a Llama with a score head ----------------------------------------------------

HEAD, EPSILON = "score_head", 1e-8
# versions of Safe RLHF differ in them
OPTIONAL = (f"{HEAD}.bias", "normalizer.mean", "normalizer.var", "normalizer.count")


@settings(kw_only=True)
class BeaverCost(Checkpoint):
    """A cost model of Safe RLHF; higher is worse, above 0 is unsafe.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    """

    repo: str = "PKU-Alignment/beaver-7b-unified-cost"

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        model, tensors = self.model(heads=[f"{HEAD}.weight"], optional=OPTIONAL)
        if (made_for := getattr(model.config, "score_type", "cost")) != "cost":
            # a reward has the same keys, and its number means the opposite
            raise AssetError(
                f"{self.folder} is a {made_for} model, not a cost model; name one as repo whose "
                "score_type is cost"
            )
        head = single(self.folder, model, tensors, HEAD)
        if getattr(model.config, "do_normalize", False):
            # not shifted by their mean: that would move the boundary between safe and unsafe from 0
            with one_sentence(self.folder):
                variance = tensors["normalizer.var"].to(model.device).float()
            head = partial(_scaled, head, variance.sqrt() + EPSILON)
        # the model was trained to give its score at the end token
        end_id = self.tokenizer.eos_token_id
        backbone = self.backbone(model, "safe-rlhf", end_id=end_id)
        options = {"text_format": "safe-rlhf", "ends": "always"}
        return self.made(LMScorer, "beaver-7b-cost", COST, backbone, head, options)


def _scaled(head: HeadFunction, deviation: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the costs of hidden states, divided by the deviation that they had in training."""
    return head(states) / deviation


# --- QRM-Llama3.1-8B: a reward and a cost in one pass ---------------------------------------------
#
# A regression on the last token gives the quantiles of 19 objectives, such as helpfulness and
# safety. The reward is their weighted sum, with weights that a gating network reads from the
# prompt. Only the first version of the model has the objective of safety.

OBJECTIVES, QUANTILES = 19, 19
THRESHOLD = 0.5  # the is_safe at which the cost is 0
SAFE = 10  # the objective beavertails-is_safe, 1 where raters called an answer safe
TEMPERATURE = 5.0
# <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
TURN = (128009, 128006, 78191, 128007, 271)


class AnchoredBackbone(Backbone):
    """A model that puts the hidden state where the answer begins beside that of the last token.

    That is the state at the first id of `TURN`, the last time that it occurs: (R, H) becomes
    (R, 2 H).
    """

    reads_tokens = False
    anchor = TURN

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids up to the anchor, with which every text of a prompt starts."""
        ids = super().prefix(prompt)
        return ids[: self.anchored(ids)]

    def anchored(self, ids: Sequence[int]) -> int:
        """Return the number of ids up to the first id of the anchor's last occurrence.

        That id counts too.

        Raises
        ------
        ParameterError
            When the anchor does not occur in the ids.
        """
        n = len(self.anchor)
        for start in reversed(range(len(ids))):
            if tuple(ids[start : start + n]) == self.anchor:
                return start + 1
        raise ParameterError(
            f"the text does not hold the tokens {list(self.anchor)}, after which the scorer "
            "expects the answer; use the chat template that it was trained with"
        )

    def states_of(self, row: torch.Tensor, ids: Sequence[int], count: int) -> torch.Tensor:
        """Return the states of the last tokens beside the anchor's, (count, 2 H)."""
        # from the end: padding is on the left
        return with_anchor(row[-count:], row[self.anchored(ids) - 1 - len(ids)])

    def with_opening(self, states: torch.Tensor, opening: torch.Tensor) -> torch.Tensor:
        """Return the states (count, H) beside that of the prefix, which ends with the anchor."""
        return with_anchor(states, opening)


def with_anchor(states: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return states (count, H) and the anchor's state beside each of them, (count, 2 H)."""
    return torch.cat([states, anchor.expand_as(states)], dim=-1)


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
        logits: torch.Tensor = self.layers(states) / self.temperature
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
        """Build the layers; `QRM.head` fills in the weights."""
        super().__init__()
        self.regression_layer = nn.Linear(hidden, OBJECTIVES * QUANTILES, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(OBJECTIVES))
        self.gating = Gate(hidden, width, temperature)

    def objectives(self, states: torch.Tensor) -> torch.Tensor:
        """Return the expectation of every objective, (R, 19).

        The transformation takes verbosity out of the objectives, as in the model's published code.
        """
        last, _ = states.chunk(2, dim=-1)
        quantiles: torch.Tensor = self.regression_layer(last).unflatten(-1, (OBJECTIVES, QUANTILES))
        return quantiles.mean(-1) @ self.reward_transform_matrix

    def reward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the objectives, (R,)."""
        _, prompt_end = states.chunk(2, dim=-1)
        weighted: torch.Tensor = self.gating(prompt_end) * self.objectives(states)
        return weighted.sum(-1)

    def cost(self, states: torch.Tensor) -> torch.Tensor:
        """Return 0.5 - is_safe, (R,); is_safe is near 1 for safe answers."""
        return THRESHOLD - self.objectives(states)[:, SAFE]


# a model stays for as long as a scorer holds `Head.reward` or `Head.cost`
_SHARED: WeakValueDictionary[tuple[Path, str, str], Head] = WeakValueDictionary()


@settings(kw_only=True)
class QRM(Checkpoint):
    """What reward and cost of QRM share: two scorers on one backbone share each forward pass."""

    repo: str = "nicolinho/QRM-Llama3.1-8B"

    def head(self) -> Head:
        """Return head and backbone, loaded or those that another scorer has loaded."""
        key = (self.folder.resolve(), self.dtype, self.device)
        known = _SHARED.get(key)
        if known is not None:
            return known
        with torch.device("meta"):  # names without numbers
            keys = sorted(Head(1, 1).state_dict())
        model, tensors = self.model(heads=keys)
        width = len(tensors["gating.layers.0.weight"])
        temperature = getattr(model.config, "gating_temperature", TEMPERATURE)
        head = Head(model.config.hidden_size, width, float(temperature))
        # other sizes are refused: only the first version of QRM has the objective of safety
        with one_sentence(self.folder):
            head.load_state_dict(tensors)
        head.backbone = self.backbone(model, "chat", AnchoredBackbone)
        # raises when the chat template does not write what stands between prompt and answer
        head.backbone.prefix("")
        head.files = contents_of(self.folder)
        _SHARED[key] = head
        # eval: the gate's normalisation uses the statistics of its training
        return head.to(model.device).eval()


@settings(kw_only=True)
class QRMReward(QRM):
    """The reward of QRM, about 0 to 1; higher is better.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    """

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        head = self.head()
        name = "qrm-llama-3.1-8b-reward"
        return self.made(LMScorer, name, REWARD, head.backbone, head.reward, {}, files=head.files)


@settings(kw_only=True)
class QRMCost(QRM):
    """The cost of QRM, 0.5 - is_safe; higher is worse.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    """

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        head = self.head()
        formula = {"scale": 1.0, "threshold": THRESHOLD, "adjusted": True}
        name = "qrm-llama-3.1-8b-cost"
        return self.made(LMScorer, name, COST, head.backbone, head.cost, formula, files=head.files)
