"""An engine whose model runs in a server: token ids go there, and sampled token ids come back.

It is an `igcore.engine.local.Engine` without latents, over the ``/v1/completions`` of vLLM, or the
``/completion`` of llama.cpp's server. One request draws all samples of a beam. It never has several
prompts: a request has one seed, from which all of them would draw. The engine stores token ids
alone: the server's prefix cache avoids computing a beam again.

A server applies one bias to a whole request, but a penalty differs from position to position. So a
penalised sample is first drawn from the policy, and each of its tokens is accepted with a
probability equal to its factor f. A rejected token is drawn again with all factors of its position
as a bias, and the sample continues from there with the policy. A token x is then accepted with
probability p(x) f(x) and drawn again with probability 1 - Z, where Z is the sum of p f; together
that is p f / Z, the distribution of a local retry.

At a temperature T the server samples from r, proportional to p^(1/T), and a bias of log f on the
raw logits multiplies r by f^(1/T). So a token is accepted with probability f^(1/T), and the same
sum gives r f^(1/T) / Z. Under top-k or top-p a bias also changes which tokens are left, which an
accepted token does not show. So a token is then always drawn again where its position has factors.

Differences from a local engine:

* A key sets the seed of a request, not of a token. Servers add floats in another order from batch
  to batch, so the same seed may give other tokens, unless a server promises batch invariance. A
  repeated run then agrees in its statistics and not bit by bit.
* A ban is a bias of -`BAN` nats. The tokens after a rejected one are discarded, which no count of
  work shows.
* A server returns the reference probability of a token, not the one from which it was sampled. So
  under a penalty, a temperature or truncation log q of a block is NaN, and so is the KL of its
  round in a trace. A server that was started to return other probabilities is refused.
* llama.cpp's server returns no probability of a token inside a character of several tokens. All
  log-probabilities of such a sample are NaN.
* `go_on` draws up to a whole block, of which a search may leave the last tokens.
* Near ties are neither detected nor counted. There are no logits, which ARGS needs.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from igcore.engine.block import Block, Keys, Penalties
from igcore.engine.diversity import Penalty
from igcore.engine.kv_cache import History
from igcore.engine.sampling import AS_IS, Sampling, uniforms
from igcore.errors import PolicyError

from .server import CERTAIN, SAMPLING, Sample, Server, samples_in

BAN = 100.0  # nats; the largest bias in OpenAI's interface
SEEDS = 2**31
Bias = dict[str, float]  # token -> nats


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

        See `igcore.engine.local.LocalEngine.sample_block`.

        Raises
        ------
        PolicyError
            When a request fails or a reply is malformed, and for a server whose log-probabilities
            are not those of the model itself where `sampling` differs from it.
        """
        block = Block.empty(self._drawn, len(rows))
        penalties, known = penalties or [None] * len(rows), known or [()] * len(rows)
        for c, tokens in enumerate(known):
            for token in tokens:
                block.append(c, token, math.nan, math.nan, False)
        # candidate whose next token was rejected -> the bias with which it is drawn again
        biases: dict[int, Bias] = {}
        pending = [c for c in range(len(rows)) if len(known[c]) < len(keys[c])]
        while pending:
            groups = self._groups(pending, rows, block, biases)
            bodies = []
            for first, *others in groups:
                done = block.tokens[first]
                prompt, left = self.sequences[rows[first]] + done, keys[first][len(done) :]
                bodies.append(self._body(prompt, left, 1 + len(others), biases.get(first)))
            try:
                self._check_reference()
                for group, samples in zip(groups, self._samples(bodies), strict=True):
                    for c, sample in zip(group, samples, strict=True):
                        self._add(block, c, sample, penalties[c], keys[c], biases)
            except ValueError as error:
                raise PolicyError(
                    f"the server at {self.server.url} gave a reply that is no completion with "
                    f"token ids and their log-probabilities ({' '.join(str(error).split())[:200]})"
                    "; serve the model with vLLM or llama.cpp's server"
                ) from None
            growing = [c for c in pending if len(block.tokens[c]) < len(keys[c])]
            pending = [c for c in growing if not block.ended[c]]
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
        self, rows: Sequence[int], texts: Sequence[list[int]], keys: Keys, depth: int, step: int
    ) -> Block:
        """Sample tokens after texts, one for each of their keys, or up to an end token.

        See `igcore.engine.local.Engine.go_on`; `depth` and `step` are ignored, because the
        server keeps its own cache. Nothing of a text counts as read here.
        """
        whole = [[0] * len(text) + list(own) for text, own in zip(texts, keys, strict=True)]
        block = self.sample_block(rows, whole, known=texts)
        for c, text in enumerate(texts):
            for part in (block.tokens, block.log_p, block.log_q, block.near):
                del part[c][: len(text)]
            block.encoded[c] -= len(text)
        return block

    def _body(
        self, prompt: list[int], keys: Sequence[int], n: int, bias: Bias | None
    ) -> dict[str, Any]:
        """Return a request for n samples of one token per key, or of one token with a bias."""
        key, most = keys[0], len(keys)
        if bias is not None:  # other bits of the key, or the rejected token would be drawn again
            key, most = key >> 32, 1
        body = {
            **SAMPLING,
            **vars(self.sampling),
            "top_k": self.sampling.top_k or -1,
            "prompt": prompt,
            "max_tokens": most,
            "n_predict": most,  # llama.cpp's
            "n": n,
            "n_cmpl": n,  # llama.cpp's
            "seed": key % SEEDS,
            "stop_token_ids": sorted(self.eos_ids),
        }
        return body if bias is None else body | {"logit_bias": bias}

    def _groups(
        self, candidates: Sequence[int], rows: Sequence[int], block: Block, biases: Collection[int]
    ) -> list[list[int]]:
        """Return the candidates of each request: those that differ in their keys alone."""
        alike: dict[Hashable, list[int]] = {}
        for c in candidates:
            own = c if c in biases else None  # a bias belongs to one prefix
            alike.setdefault((rows[c], own, tuple(block.tokens[c])), []).append(c)
        most = self.server.samples
        cuts = [(group, at) for group in alike.values() for at in range(0, len(group), most)]
        return [group[at : at + most] for group, at in cuts]

    def _add(
        self,
        block: Block,
        c: int,
        sample: Sample,
        penalty: Penalty | None,
        keys: Sequence[int],
        biases: dict[int, Bias],
    ) -> None:
        """Append a sample to a candidate, up to its end or the first rejected token.

        A token that was drawn with a bias is always accepted. Raises ``ValueError`` for a sample
        that ends too early.
        """
        tokens = sample.tokens
        biased = biases.pop(c, None) is not None
        wanted = 1 if biased else len(keys) - len(block.tokens[c])
        for token, x in zip(tokens[:wanted], sample.log_p, strict=False):
            if penalty and not biased:
                factors = penalty.at(block.tokens[c])
                key = keys[len(block.tokens[c])]
                accepted = factors.get(token, 1.0) ** (1 / self.sampling.temperature)
                again = bool(factors) and self.sampling.truncates
                if again or uniforms([key])[0, -1] >= accepted:
                    biases[c] = bias_of(factors)
                    return
            known = self.sampling == AS_IS and not penalty
            block.append(c, token, x, x if known else math.nan, False)
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
        one = self._body(self.server.text, [0], 1, None) | {"top_k": 1}
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
            samples = sorted(samples_in(content), key=attrgetter("index"))
            if [sample.index for sample in samples] != list(range(body["n"])):
                raise ValueError(f"it does not have the {body['n']} samples of the request")
            for sample in samples:
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


def bias_of(factors: Mapping[int, float]) -> Bias:
    """Return the bias (nats) of each token with a factor on its probability."""
    return {
        str(token): max(math.log(factor), -BAN) if factor > 0 else -BAN
        for token, factor in factors.items()
    }
