"""The latents of rollouts, in memory or encoded again for every batch.

They are not stored on disk: at 7B they take megabytes per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from igcore.critic.latent import Latents, encode, latents
from igcore.engine.device import GIB
from igcore.progress import progress

ENCODE = 32  # responses encoded at a time where all latents are kept in memory


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
        See `igcore.critic.latent.encode`.
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
