"""The reward llama-7b-rm of ARGS: a Llama with a linear head at its last token."""

import re
from collections.abc import Callable
from functools import partial

from ..scorers import REWARD
from ..settings import settings
from .lm_scorer import LMScorer
from .source import Checkpoint
from .templates import TextFormat

HEAD = "score"
USER = re.compile("human:", re.IGNORECASE)


@settings(kw_only=True)
class LlamaReward(Checkpoint):
    """A ``LlamaForSequenceClassification`` with one output; higher is better.

    The number of labels is that of the head itself, because transformers assumes two when the
    configuration names none. No end token is appended, as in ARGS.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Checkpoint`.
    text_format : str
        How prompt and answer become text, a key of `igcore.models.templates.TEMPLATES`. The model
        was trained on dialogues of ``human-assistant``, in which an answer is read as ARGS reads
        it, up to where it goes on with "human:" in the user's place.
    """

    repo: str = "argsearch/llama-7b-rm-float32"
    text_format: TextFormat = "human-assistant"

    def scorer(self) -> LMScorer:
        """Return the scorer, unchecked."""
        model, tensors = self.model(heads=[f"{HEAD}.weight"])
        backbone = self.backbone(model, self.text_format)
        if self.text_format == "human-assistant":
            # not in the template itself: a cost has to read everything
            backbone.template = partial(_first_turn, backbone.template)
        head = self.single(model, tensors, HEAD)
        options = {"text_format": self.text_format}
        return self.lm_scorer("llama-7b-rm", REWARD, backbone, head, **options)


def _first_turn(whole: Callable[[str, str], str], prompt: str, answer: str) -> str:
    """Write a pair of which the answer ends where a user would speak again."""
    return whole(prompt, USER.split(answer)[0])
