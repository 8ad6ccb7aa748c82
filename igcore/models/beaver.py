"""The cost beaver-7b-unified-cost of Safe RLHF: a Llama with a score head.

Do not load these files with transformers' class for sequence classification: it accepts them and
puts a random head in the place of theirs.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from ..errors import AssetError
from ..scorers import COST
from ..settings import settings
from .lm_scorer import LMScorer
from .pretrained import one_sentence
from .source import Checkpoint
from .templates import TextFormat

HEAD, EPSILON = "score_head", 1e-8
# versions of Safe RLHF differ in them
OPTIONAL = (f"{HEAD}.bias", "normalizer.mean", "normalizer.var", "normalizer.count")


@settings(kw_only=True)
class BeaverCost(Checkpoint):
    """A cost model of Safe RLHF; higher is worse, above 0 is unsafe.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Checkpoint`.
    text_format : str
        How prompt and answer become text, a key of `igcore.models.templates.TEMPLATES`.
    """

    repo: str = "PKU-Alignment/beaver-7b-unified-cost"
    text_format: TextFormat = "safe-rlhf"
    boundary: ClassVar[float | None] = 0

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        model, tensors = self.model(heads=[f"{HEAD}.weight"], optional=OPTIONAL)
        if (made_for := getattr(model.config, "score_type", "cost")) != "cost":
            # a reward has the same keys, and its number means the opposite
            raise AssetError(
                f"{self.folder} is a {made_for} model, not a cost model; name one as repo whose "
                "score_type is cost"
            )
        head = self.single(model, tensors, HEAD)
        if getattr(model.config, "do_normalize", False):
            # not shifted by their mean: that would move the boundary between safe and unsafe from 0
            with one_sentence(self.folder):
                variance = tensors["normalizer.var"].to(model.device).float()
            head = partial(_scaled, head, variance.sqrt() + EPSILON)
        # the model was trained to give its score at the end token
        end_id = self.tokenizer.eos_token_id
        backbone = self.backbone(model, self.text_format, end_id=end_id)
        options = {"text_format": self.text_format, "ends": "always"}
        return self.lm_scorer("beaver-7b-cost", COST, backbone, head, **options)


def _scaled(head: Callable, deviation: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the costs of hidden states, divided by the deviation that they had in training."""
    return head(states) / deviation
