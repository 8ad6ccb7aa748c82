"""An engine whose model runs in a server: token ids go there, and sampled token ids come back.

It has the methods of `igcore.engine.local.LocalEngine` that a search without latents needs, over
the ``/v1/completions`` of vLLM, or the ``/completion`` of llama.cpp's server. One request asks
for all samples of a beam. The engine keeps nothing but token ids: the server's prefix cache spares
it reading a beam again.

A server takes one bias for a whole request, and a penalty differs from position to position. So a
penalised sample is first drawn from the policy, and each of its tokens accepted with the
probability that is its factor f. A refused token is drawn again with all factors of its position as
a bias, and the sample goes on behind it from the policy. A token x is then accepted with
probability p(x) f(x) and drawn again with probability 1 - Z, where Z is the sum of p f; together
that is p f / Z, the distribution that a local retry samples from.

It differs from a local engine in this:

* A key decides the seed of a request, and no longer a token. Servers add floats in another order
  from batch to batch, so that the same seed may give other tokens, unless a server promises batch
  invariance. Runs are then repeated in their statistics and not bit by bit.
* A ban is a bias of -`BAN` nats. The tokens behind a refused one were drawn in vain, which no count
  of work shows.
* A server gives the reference probability of a penalised token, and not the one that it was sampled
  from. So log q of such a block is NaN, and with it the KL of its round in a trace.
* llama.cpp's server gives no probability of a token inside a character of several tokens. All
  log-probabilities of such a sample are NaN.
* No near tie is seen, and none is counted. No logits are kept, which ARGS needs.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..engine.block import Block
from ..engine.diversity import Penalty
from ..engine.kv_cache import History
from ..engine.sampling import uniforms
from ..errors import PolicyError
from .server import SAMPLING, Sample, Server, samples_in

BAN = 100.0  # nats; what OpenAI's interface allows
SEEDS = 2**31
Bias = dict[str, float]  # token -> nats
# sequences -> the output of a middle layer at every token, (n, H) float32 each
States = Callable[[Sequence[Sequence[int]]], list[Tensor]]


class ServedEngine:
    """Samples blocks of tokens from a model in a server, see the module.

    Candidates are numbered as by `igcore.engine.local.LocalEngine`. It takes no ``steering``, and
    has the states of a middle layer only where they are given to it.

    Parameters
    ----------
    server : Server
    eos_ids : collection of int
        Tokens that end a sequence. Whatever a server sends after one is dropped.
    states : callable, optional
        Gives the output of a middle layer, such as `igcore.serve.states.HiddenStates.read`.

    Attributes
    ----------
    sequences : list of list of int
        The token ids of each row so far, those of its prompt first.
    asked : list of int
        Tokens of each row's prompt.
    """

    def __init__(self, server: Server, eos_ids: Collection[int], states: States | None = None):
        self.server, self.eos_ids, self.states = server, frozenset(eos_ids), states
        self._start([], [])

    def _start(self, sequences: list[list[int]], asked: list[int]) -> None:
        """Begin a block from these rows."""
        self.sequences, self.asked = sequences, asked
        # live candidate of any round -> its sequence, and how much of it is the prompt
        self._grown: dict[int, tuple[list[int], int]] = {}
        self._drawn = 0  # number of candidates of all rounds so far

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with prompts, one row each; nothing is sent yet."""
        self._start(list(map(list, prompts)), list(map(len, prompts)))

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalties: Sequence[Penalty | None] | None = None,
        last: bool = False,
        known: Sequence[Sequence[int]] = (),
    ) -> Block:
        """Sample one continuation of each given row.

        See `igcore.engine.local.LocalEngine.sample_block`.

        Raises
        ------
        PolicyError
            When the server gives no samples that can be used.
        """
        length, block = len(keys[0]), Block.empty(self._drawn, len(rows))
        penalties, known = penalties or [None] * len(rows), known or [()] * len(rows)
        for c, tokens in enumerate(known):
            for token in tokens:
                block.append(c, token, math.nan, math.nan, False)
        # candidate whose next token was refused -> the bias with which it is drawn again
        biases: dict[int, Bias] = {}
        open_ = [c for c in range(len(rows)) if len(known[c]) < length]
        while open_:
            shares = self._shares(open_, rows, block, biases)
            bodies = []
            for first, *others in shares:
                done = block.tokens[first]
                prompt, left = self.sequences[rows[first]] + done, keys[first][len(done) :]
                bodies.append(self._body(prompt, left, 1 + len(others), biases.get(first)))
            try:
                for share, choices in zip(shares, self._choices(bodies), strict=True):
                    for c, choice in zip(share, choices, strict=True):
                        self._add(block, c, choice, penalties[c], keys[c], biases)
            except ValueError as error:
                raise PolicyError(
                    f"the server at {self.server.url} gave a reply that is no completion with "
                    f"token ids and their log-probabilities ({' '.join(str(error).split())[:200]})"
                    "; serve the model with vLLM or llama.cpp's server"
                ) from None
            open_ = [c for c in open_ if not block.ended[c] and len(block.tokens[c]) < length]
        for c, row in enumerate(rows):
            tokens = block.tokens[c]
            # as many as a local model would read: neither an end token nor the last of a response
            unread = block.ended[c] or (last and len(tokens) == length)
            block.encoded[c] = len(tokens) - unread
            if not block.ended[c]:
                self._grown[self._drawn + c] = self.sequences[row] + tokens, self.asked[row]
        self._drawn += len(rows)
        return block

    def _body(
        self, prompt: list[int], keys: Sequence[int], n: int, bias: Bias | None
    ) -> dict[str, Any]:
        """Return a request for n samples of a token for each key: of one token with a bias."""
        key, most = keys[0], len(keys)
        if bias is not None:  # other bits of the key, or the refused token would be drawn again
            key, most = key >> 32, 1
        body = SAMPLING | {
            "prompt": prompt,
            "max_tokens": most,
            "n_predict": most,  # llama.cpp's
            "n": n,
            "n_cmpl": n,  # llama.cpp's
            "seed": key % SEEDS,
            "stop_token_ids": sorted(self.eos_ids),
        }
        return body if bias is None else body | {"logit_bias": bias}

    def _shares(
        self, candidates: Sequence[int], rows: Sequence[int], block: Block, biases: Collection[int]
    ) -> list[list[int]]:
        """Return the candidates of each request: those that differ in nothing but their keys."""
        alike: dict[Hashable, list[int]] = {}
        for c in candidates:
            own = c if c in biases else None  # its bias is that of its own prefix
            alike.setdefault((rows[c], own, tuple(block.tokens[c])), []).append(c)
        most = self.server.samples
        cuts = [(group, at) for group in alike.values() for at in range(0, len(group), most)]
        return [group[at : at + most] for group, at in cuts]

    def _add(
        self,
        block: Block,
        c: int,
        choice: Sample,
        penalty: Penalty | None,
        keys: Sequence[int],
        biases: dict[int, Bias],
    ) -> None:
        """Append a sample to a candidate, up to its end or the first token that is refused.

        A token that was drawn with its bias is not refused again. ``ValueError`` for a sample that
        ends too early.
        """
        tokens = choice.tokens
        biased = biases.pop(c, None) is not None
        asked = 1 if biased else len(keys) - len(block.tokens[c])
        for token, x in zip(tokens[:asked], choice.log_p, strict=False):
            if penalty and not biased:
                factors = penalty.at(block.tokens[c])
                key = keys[len(block.tokens[c])]
                if uniforms([key])[0, -1] >= factors.get(token, 1.0):
                    biases[c] = bias_of(factors)
                    return
            block.append(c, token, x, math.nan if penalty else x, False)
            if token in self.eos_ids:
                block.ended[c] = True
                return
        if len(tokens) != asked:
            end = f"{tokens[-1:]}, which is no end token of the policy"
            raise ValueError(f"a sample of {len(tokens)} tokens for {asked} ends with {end}")

    def _choices(self, bodies: Sequence[dict[str, Any]]) -> list[list[Sample]]:
        """Return the samples that each request gives, in their order."""
        found = []
        for body, content in zip(bodies, self.server.complete(bodies), strict=True):
            choices = sorted(samples_in(content), key=attrgetter("index"))
            if [choice.index for choice in choices] != list(range(body["n"])):
                raise ValueError(f"it has not the {body['n']} samples that were asked for")
            for choice in choices:
                highest = max(choice.tokens, default=0)
                if highest >= self.server.vocabulary:
                    raise ValueError(f"token {highest} is unknown to the tokenizer")
            found.append(choices)
        return found

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start; only `keep` may still be selected."""
        self._grown = {c: self._grown[c] for c in keep}

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates of any round the rows, in this order.

        Raises
        ------
        KeyError
            When a candidate has ended, was freed or was never sampled.
        """
        chosen = [self._grown[c] for c in candidates]
        self._start([ids for ids, _ in chosen], [asked for _, asked in chosen])

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return the states of the middle layer at all tokens so far of live candidates.

        There is no o_t and no KV cache, whatever `keys` says.

        Raises
        ------
        PolicyError
            When the server gives no states.
        KeyError
            As `select`.
        """
        chosen = [self._grown[c] for c in candidates]
        # without states the policy refuses a critic
        found = self.states([ids for ids, _ in chosen])  # type: ignore[misc]
        said = [states[asked:] for states, (_, asked) in zip(found, chosen, strict=True)]
        mask = pad_sequence([torch.ones(len(x), dtype=torch.bool) for x in said], batch_first=True)
        return History(mask, middle=pad_sequence(said, batch_first=True))


def bias_of(factors: Mapping[int, float]) -> Bias:
    """Return the bias (nats) of each token with a factor on its probability."""
    return {
        str(token): max(math.log(factor), -BAN) if factor > 0 else -BAN
        for token, factor in factors.items()
    }
