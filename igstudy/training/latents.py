"""The latents of rollouts: computed in one forward pass, and in memory or again for every batch.

They are not stored on disk: at 7B they take megabytes per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from igcore.critic.latent import Latents, latents
from igcore.engine.device import device_of
from igcore.engine.kv_cache import History, attending, inputs_of, padded, watched
from igcore.engine.prepack import viewed
from igcore.errors import ParameterError, PolicyError
from igcore.progress import progress

GIB = 2**30
ENCODE = 32  # responses encoded at a time where all latents are kept in memory


@torch.no_grad()  # not inference mode, whose tensors cannot be trained on
def encode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    features: str = "ho",
    layer: int | None = None,
) -> History:
    """Encode B whole sequences at once, and return the states of their responses.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only.
    prompts, responses : sequences of B sequences of int
        Token ids; prompts of at least one, and not all responses empty. An end token does not
        belong to a response: the engine never encodes it.
    features : str
        One of `igcore.critic.latent.FEATURES`, or the letters of several, such as ``hom``. For
        ``m`` alone the layers above `layer` are not run, and only `middle` is returned.
    layer : int, optional
        The middle layer of ``m``, counted from 0.

    Raises
    ------
    ParameterError
        For a layer that the model does not have.
    PolicyError
        When the model runs a function that igcore cannot follow, see `igcore.engine.view`.
    """
    # a model that calls its layers something else has none here, and its middle cannot be read. The
    # model and not its view is asked: one in a server says so here
    n_layers = len(getattr(model.get_decoder(), "layers", []))
    view = viewed(model).model
    if view is model:  # the hooks below would also end passes of other users of the model
        raise PolicyError(
            f"the forward of {type(model).__name__} was replaced by a function that igcore cannot "
            "follow, so no critic can read it; give the model as it was before"
        )
    if "m" in features and (layer is None or not 0 <= layer < n_layers):
        raise ParameterError(
            f"layer is {layer}; features 'm' need one of the {n_layers} layers of "
            f"{type(model).__name__}, from 0"
        )
    watch = layer if "m" in features else None
    # each prompt is encoded once for all its responses
    first = list(dict.fromkeys(map(tuple, prompts)))
    owners = [first.index(tuple(prompt)) for prompt in prompts]
    device = device_of(model)
    owner = torch.tensor(owners, device=device)
    # prompts end and responses begin in one column: padding is on the outer sides
    ids, mask = padded(first, device)  # (P, L)
    words, spoken = padded(responses, device, side="right")  # (B, n)
    whole = torch.cat([mask[owner], spoken], dim=1)  # (B, L + n)
    length = ids.shape[1]  # L
    cache = DynamicCache(config=model.config)
    # the pass ends here; never at the head, whose logits (B, n, V) would be the largest tensor
    last = "middle" if features == "m" else "hidden"
    if all(type(x) is DynamicLayer for x in cache.layers):
        watched(view, watch, cache, last, **inputs_of(ids, mask), logits_to_keep=0)
        cache.batch_select_indices(owner)  # from one row per prompt to one per response
    else:  # a window or a recurrent state cannot continue with several tokens at once
        words = torch.cat([ids[owner], words], dim=1)
    _, seen = watched(view, watch, cache, last, **inputs_of(words, whole), logits_to_keep=0)
    n = spoken.shape[1]
    # the last n columns: the second branch has read the prompts as well
    states: dict[str, Any] = {name: x[:, -n:] for name, x in seen.items()}
    # a pass that ended at the middle layer has no keys of the layers above it
    if last == "hidden":
        layers = attending(cache)
        keys, values = [x.keys for x in layers], [x.values for x in layers]
        states["keys"] = [x[:, :, length:] for x in keys]
        states["values"] = [x[:, :, length:] for x in values]
        states["owner"] = list(range(len(owners)))  # each response has a copy of its prompt
        states["prompts"] = History(
            mask[owner].bool(),
            keys=[x[:, :, :length] for x in keys],
            values=[x[:, :, :length] for x in values],
        )
    return History(spoken.bool(), **states)


def together(responses: Sequence[Latents]) -> Latents:
    """Return the latents of single responses together, padded to one length."""
    return Latents(*[pad_sequence(list(x), batch_first=True) for x in zip(*responses, strict=True)])


def single(x: Latents) -> list[Latents]:
    """Return the latents of each response alone, without padding."""
    # the first four fields are by token of the response, the last two by token of the prompt
    masks = [x.mask] * 4 + [x.prompt_mask] * 2
    return [
        Latents(*[part[i, mask[i]] for part, mask in zip(x, masks, strict=True)])
        for i in range(len(x.mask))
    ]


@dataclass
class Source:
    """The latents of N responses, by number.

    They stay in memory if they take at most `memory_gb` GiB, those of a prompt once for all its
    responses. If not, every `take` encodes again.

    Parameters
    ----------
    model, prompts, responses, features, layer
        See `encode`.
    """

    model: PreTrainedModel
    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    features: str
    layer: int | None
    memory_gb: float
    held: dict[int, Latents] = field(init=False, default_factory=dict)  # of each response

    def __post_init__(self) -> None:
        texts = self.prompts, self.responses
        longest = [max(range(len(x)), key=lambda i: len(x[i])) for x in texts]
        # an upper bound: as if all prompts and responses were as long as the longest. Two texts are
        # encoded, padded to the longest of both kinds, and one of them is measured
        sizes = [x[:1].nbytes for x in self._encode(longest)]
        of_response, of_prompt = sum(sizes[:4]), sum(sizes[4:])
        n_prompts = len(set(map(tuple, self.prompts)))
        if len(self.responses) * of_response + n_prompts * of_prompt <= self.memory_gb * GIB:
            self._hold()

    def take(self, index: Sequence[int]) -> Latents:
        """Return the latents of some of the responses, in this order."""
        if not self.held:
            return self._encode(index)
        return together([self.held[i] for i in index])

    def _hold(self) -> None:
        """Encode all responses once and keep their latents in memory."""

        def by_length(i: int) -> tuple[int, Sequence[int], int]:
            prompt = self.prompts[i]
            return len(prompt), prompt, len(self.responses[i])

        # equal lengths together need little padding; equal prompts together are encoded once
        order = sorted(range(len(self.responses)), key=by_length)
        # prompt -> its mask, keys and values in the first latents with it: the others share these
        # tensors, which may be far larger than those of the responses
        first: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        with progress(len(order), f"latents {self.features}") as bar:
            for start in range(0, len(order), ENCODE):
                index = order[start : start + ENCODE]
                for i, one in zip(index, single(self._encode(index)), strict=True):
                    of_prompt = first.setdefault(tuple(self.prompts[i]), one[4:])
                    self.held[i] = Latents(*one[:4], *of_prompt)
                bar.update(len(index))

    def _encode(self, index: Sequence[int]) -> Latents:
        """Encode some of the responses."""
        prompts = [self.prompts[i] for i in index]
        responses = [self.responses[i] for i in index]
        states = encode(self.model, prompts, responses, self.features, self.layer)
        return latents(states, self.features)
