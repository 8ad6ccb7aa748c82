"""An engine whose model runs in a server: token ids go there, and sampled token ids come back.

It is an `igcore.engine.local.Engine` without latents, over the ``/v1/completions`` of vLLM. One
request draws all samples of a beam. It never has several prompts: a request has one seed, from
which all of them would draw. The engine stores token ids alone: the server's prefix cache avoids
computing a beam again.

Differences from a local engine:

* A key sets the seed of a request, not of a token. Servers add floats in another order from batch
  to batch, so the same seed may give other tokens, unless a server promises batch invariance. A
  repeated run then agrees in its statistics and not bit by bit.
* Every sample is drawn from the policy, a retry as well: a server has no penalty that differs from
  position to position. `igserve.policy.ServedPolicy.check` refuses settings that ask for one.
* A server returns the reference probability of a token, not the one from which it was sampled. So
  under a temperature or truncation log q of a block is NaN, and so is the KL of its round in a
  trace. A server that was started to return other probabilities is refused.
* `go_on` draws up to a whole block, of which a search may leave the last tokens.
* Near ties are neither detected nor counted. There are no logits, which ARGS needs.
"""

import math
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from igcore.engine.block import Block, Keys, Penalties
from igcore.engine.kv_cache import History
from igcore.engine.sampling import AS_IS, Sampling
from igcore.errors import PolicyError

from .server import CERTAIN, SAMPLING, Completion, Sample, Server

SEEDS = 2**31


class ServedEngine:
    """Samples blocks of tokens from a model in a server, see the module.

    It numbers candidates as `igcore.engine.local.Engine` says.

    Parameters
    ----------
    server : Server
    eos_ids : collection of int
        Tokens that end a sequence. Tokens after one are dropped.
    sampling : Sampling, optional
        The distribution of all tokens; by default the policy's own.

    Attributes
    ----------
    sequences : list of list of int
        The token ids of each row so far, those of its prompt first.
    """

    def __init__(self, server: Server, eos_ids: Collection[int], sampling: Sampling | None = None):
        self.server, self.eos_ids = server, frozenset(eos_ids)
        self.sampling = sampling or AS_IS
        self.open([])

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin a block from prompts, one row each; nothing is sent yet."""
        self.sequences = list(map(list, prompts))
        self._grown: dict[int, list[int]] = {}  # live candidate of any round -> its sequence
        self._drawn = 0  # number of candidates of all rounds so far

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Keys,
        penalties: Penalties = None,
        last: bool = False,
        known: Sequence[Sequence[int]] = (),
    ) -> Block:
        """Sample one continuation of each given row.

        See `igcore.engine.local.LocalEngine.sample_block`; `penalties` are ignored.

        Raises
        ------
        PolicyError
            When a request fails or a reply is malformed, and for a server whose log-probabilities
            are not those of the model itself where `sampling` differs from it.
        """
        block = Block.empty(self._drawn, len(rows))
        known = known or [()] * len(rows)
        for c, tokens in enumerate(known):
            for token in tokens:
                block.append(c, token, math.nan, math.nan, False)
        pending = [c for c in range(len(rows)) if len(known[c]) < len(keys[c])]
        # row and known tokens -> candidates that differ in their keys alone, which share a request
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for c in pending:
            alike.setdefault((rows[c], tuple(known[c])), []).append(c)
        bodies = []
        for (row, tokens), group in alike.items():
            prompt, left = [*self.sequences[row], *tokens], keys[group[0]][len(tokens) :]
            bodies.append(self._body(prompt, left, len(group)))
        try:
            if pending:
                self._check_reference()
            for group, samples in zip(alike.values(), self._samples(bodies), strict=True):
                for c, sample in zip(group, samples, strict=True):
                    self._add(block, c, sample, len(keys[c]) - len(known[c]))
        except ValueError as error:
            raise PolicyError(
                f"the server at {self.server.url} gave a reply that is no completion with "
                f"token ids and their log-probabilities ({' '.join(str(error).split())[:200]})"
                "; serve the model with vLLM"
            ) from None
        for c, row in enumerate(rows):
            tokens = block.tokens[c]
            # a local model would read neither an end token nor the last token of a response
            unread = block.ended[c] or (last and len(tokens) == len(keys[c]))
            block.encoded[c] = len(tokens) - unread
            if not block.ended[c]:
                self._grown[self._drawn + c] = self.sequences[row] + tokens
        self._drawn += len(rows)
        return block

    def go_on(
        self, rows: Sequence[int], texts: Sequence[list[int]], keys: Keys, depth: int
    ) -> Block:
        """Sample tokens after texts, one for each of their keys, or up to an end token.

        See `igcore.engine.local.Engine.go_on`; `depth` is ignored, because the server
        keeps its own cache. Nothing of a text counts as read here.
        """
        whole = [[0] * len(text) + list(own) for text, own in zip(texts, keys, strict=True)]
        block = self.sample_block(rows, whole, known=texts)
        for c, text in enumerate(texts):
            for part in (block.tokens, block.log_p, block.log_q, block.near):
                del part[c][: len(text)]
            block.encoded[c] -= len(text)
        return block

    def _body(self, prompt: list[int], keys: Sequence[int], n: int) -> dict[str, Any]:
        """Return a request for n samples of one token per key."""
        return {
            **SAMPLING,
            **vars(self.sampling),
            "top_k": self.sampling.top_k or -1,
            "prompt": prompt,
            "max_tokens": len(keys),
            "n": n,
            "seed": keys[0] % SEEDS,
            "stop_token_ids": sorted(self.eos_ids),
        }

    def _add(self, block: Block, c: int, sample: Sample, wanted: int) -> None:
        """Append a sample of so many tokens to a candidate, up to its end.

        Raises ``ValueError`` for a sample that ends too early.
        """
        tokens = sample.tokens
        for token, x in zip(tokens[:wanted], sample.log_p, strict=False):
            log_p = min(x, 0.0)  # rounding may raise it above
            block.append(c, token, log_p, log_p if self.sampling == AS_IS else math.nan, False)
            if token in self.eos_ids:
                block.ended[c] = True
                return
        if len(tokens) != wanted:
            end = f"{tokens[-1:]}, which is no end token of the policy"
            raise ValueError(f"a sample of {len(tokens)} tokens for {wanted} ends with {end}")

    def _check_reference(self) -> None:
        """Raise ``PolicyError`` if log-probabilities are those after temperature and truncation.

        If so, the only token that top-k 1 leaves has probability 1.
        """
        if self.sampling == AS_IS or self.server.checked:
            return
        one = self._body(self.server.text, [0], 1) | {"top_k": 1}
        ((sample,),) = self._samples([one])
        if not sum(sample.log_p) < CERTAIN:
            raise PolicyError(
                f"the server at {self.server.url} returns probabilities after temperature, top_p "
                "and top_k, from which the policy's own are not known; start vLLM with "
                "--logprobs-mode raw_logprobs, or leave these three out"
            )
        self.server.checked = True

    def _samples(self, bodies: Sequence[dict[str, Any]]) -> list[list[Sample]]:
        """Return the samples of each request, in their order."""
        found = []
        for body, content in zip(bodies, self.server.complete(bodies), strict=True):
            choices = Completion.model_validate_json(content).choices
            samples = sorted(choices, key=attrgetter("index"))
            if [sample.index for sample in samples] != list(range(body["n"])):
                raise ValueError(f"it does not have the {body['n']} samples of the request")
            for sample in samples:
                if len(sample.log_p) != len(sample.tokens):
                    raise ValueError("a token has no log-probability")
                highest = max(sample.tokens, default=0)
                if highest >= self.server.vocabulary:
                    raise ValueError(f"token {highest} is unknown to the tokenizer")
            found.append(samples)
        return found

    def history(self, *_: Any, **__: Any) -> History:
        """Raise ``NotImplementedError``: a server gives no hidden states."""
        raise NotImplementedError

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
        self.open([self._grown[c] for c in candidates])
