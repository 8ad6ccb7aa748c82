"""A generative guard as a cost, read from the logits of its labels.

A guard's own code generates a verdict and searches it for a word. This scorer reads the logits of
the label words instead: it needs one forward pass and returns a number instead of yes or no.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..engine.kv_cache import forward
from ..errors import ParameterError
from ..scorers import COST
from ..settings import settings
from .backbone import Backbone
from .lm_scorer import EXAMPLE, Checkpoint, HeadFunction, LMScorer
from .wording import Wording, label_ids

COMPARED = 256  # rows of the output embedding whose logits are compared with the model's own


# fields of a configuration that change the logits: of Gemma 2, of Granite
FINAL = ("final_logit_softcapping", "logits_scaling")


@settings(kw_only=True)
class GenerativeGuard(Wording, Checkpoint):
    r"""A generative guard; higher is worse.

    .. math:: C(x, y) = \log \sum_{u \in \mathrm{unsafe}} e^{z_u} - \log \sum_{s \in \mathrm{safe}}
    e^{z_s}

    Here :math:`z` are the logits of the token after the text, so the sigmoid of the cost is the
    probability of unsafe among the labels alone; `unit` chooses between the two. The scorer's name
    is ``guard:`` and the last part of `repo`.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    unsafe, safe, messages, chat_options, prefix
        See `igcore.models.wording.Wording`.
    unit : str
        ``logit gap`` or ``probability``. A budget is 0 or more, so only a probability can be held
        below even odds.

    Notes
    -----
    This example for a params file follows the model card and is untested. It has a criterion as a
    turn after the answer, and empty reasoning before the verdict::

        cost: {name: guard, repo: ibm-granite/granite-guardian-4.1-8b, unsafe: [" yes"],
               safe: [" no"], prefix: "<think>\n</think>\n<score>",
               messages: [{role: user, content: "{prompt}"},
                          {role: assistant, content: "{response}"},
                          {role: user, content: "<guardian> ... ### Criteria: ..."}]}
    """

    unit: Literal["logit gap", "probability"] = "logit gap"

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked.

        Raises
        ------
        ParameterError
            When labels are not one token each or not distinct, or when the model's logits do not
            follow from its output embedding.
        """
        labels = [*self.unsafe, *self.safe]
        write = partial(self.text, self.tokenizer)
        ids = label_ids(self.tokenizer, write(*EXAMPLE), labels)
        model, _ = self.model(AutoModelForCausalLM)
        backbone = Backbone(model, self.tokenizer, write, special=False)
        _check_logits(model, backbone, self.repo)
        score = _probability if self.unit == "probability" else _gap
        cost = partial(score, _logits(model, ids), len(self.unsafe))
        decisive = ("unsafe", "safe", "prefix", "messages", "chat_options", "unit")
        options = {option: getattr(self, option) for option in decisive}
        name = f"guard:{Path(self.repo).name}"
        return self.made(LMScorer, name, COST, backbone, cost, options, self.unit)


def _logits(model: PreTrainedModel, ids: Sequence[int]) -> HeadFunction:
    """Return a function from hidden states (R, H) to float32 logits (R, n) of some tokens."""
    head = model.get_output_embeddings()
    weight = head.weight[list(ids)].detach().float()  # (n, H)
    bias = getattr(head, "bias", None)
    if bias is not None:
        bias = bias[list(ids)].detach().float()
    config = model.config.get_text_config(decoder=True)
    cap, scaling = (getattr(config, name, None) for name in FINAL)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the labels for hidden states."""
        out = linear(hidden.to(weight.device), weight, bias)
        if cap is not None:
            out = cap * torch.tanh(out / cap)
        return out if scaling is None else out / scaling

    return logits


def _gap(logits: HeadFunction, n: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return log-sum-exp of the first n logits of hidden states minus that of the others, (R,)."""
    found = logits(hidden)
    return found[:, :n].logsumexp(1) - found[:, n:].logsumexp(1)


def _probability(logits: HeadFunction, n: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the probability (R,) of the first n labels of hidden states, among all labels."""
    return _gap(logits, n, hidden).sigmoid()


@torch.inference_mode()
def _check_logits(model: PreTrainedModel, backbone: Backbone, repo: str) -> None:
    """Raise ``ParameterError`` unless hidden states and output embedding yield the model's logits.

    Some models process their logits further, and one field means different things in different
    families.
    """
    sequence = backbone.ids(*EXAMPLE)
    ids = torch.tensor([sequence], device=model.device)
    # logits of the last token, (1, 1, V)
    _, own = forward(model, input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
    own = own[0, -1].float()
    rows = torch.linspace(0, len(own) - 1, min(COMPARED, len(own))).long().tolist()
    found, own = _logits(model, rows)(backbone.encode([sequence]))[0], own[rows]
    if (found - own).norm() > 4 * torch.finfo(model.dtype).eps ** 0.75 * own.norm():
        raise ParameterError(
            f"the logits of {repo}, a {type(model).__name__}, do not follow from its last hidden "
            f"state, output embedding and {', '.join(FINAL)}; choose a guard of another family"
        )
