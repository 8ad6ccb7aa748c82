"""An engine whose model runs in a server: token ids go there, and sampled token ids come back.

It has the methods of `igcore.engine.local.LocalEngine` that a search without latents needs, over
the ``/v1/completions`` of vLLM, SGLang or llama.cpp's server. One request asks for all samples of a
beam that share a penalty. The engine keeps nothing but token ids: the server's prefix cache spares
it reading a beam again.

It differs from a local engine in this:

* A key decides the seed of a request, and no longer a token. Servers add floats in another order
  from batch to batch, so that the same seed may give other tokens, unless a server promises batch
  invariance. Runs are then repeated in their statistics and not bit by bit.
* A server takes one bias for a whole block. So a token that failed at one position of a block is
  less likely at all of its positions, where a local retry avoids it at that position alone. A ban
  is a bias of -`BAN` nats. The policy's own distribution, from which half of the samples of a retry
  still come by default, is the same.
* A server gives the reference probability of a penalised token, and not the one that it was sampled
  from. So log q of such a block is NaN, and with it the KL of its round in a trace.
* No near tie is seen, and none is counted.
"""

import math
import re
from collections.abc import Collection, Hashable, Sequence
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, Field

from ..errors import ParameterError, PolicyError
from .block import Block
from .diversity import Penalty

BAN = 100.0  # nats; what OpenAI's interface allows
SEEDS = 2**31
# the policy's own distribution, whatever a server's or a model's defaults are
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "samplers": ["temperature"],  # llama.cpp's
    "return_token_ids": True,  # vLLM, SGLang
    "no_stop_trim": True,  # SGLang: the end token, too
    "return_tokens_as_token_ids": True,  # vLLM: names the most probable tokens by their ids
}
NAMED = re.compile(r"token_id:(\d+)")  # such a name


# --- replies --------------------------------------------------------------------------------------

Token = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class Ranked(BaseModel):
    """A token with its reference log-probability (nats)."""

    id: Token
    logprob: LogProb


class Said(Ranked):
    """A token of a sample as llama.cpp describes it."""

    top_logprobs: list[Ranked] = []


class LogProbs(BaseModel):
    """The log-probabilities of a sample: the first as llama.cpp, the others as vLLM and SGLang."""

    content: list[Said] | None = None
    token_logprobs: list[LogProb] | None = None
    top_logprobs: list[dict[str, LogProb] | None] | None = None


class Choice(BaseModel):
    """One sample."""

    index: int
    logprobs: LogProbs
    token_ids: list[Token] | None = None

    @property
    def sample(self) -> tuple[list[int], list[float]]:
        """Its tokens and their log-probabilities; ``ValueError`` where the two do not match."""
        said = self.logprobs.content or []
        tokens = self.token_ids or [token.id for token in said]
        log_p = self.logprobs.token_logprobs or [token.logprob for token in said]
        if len(tokens) != len(log_p):
            raise ValueError("tokens and log-probabilities differ in number")
        return tokens, [min(x, 0.0) for x in log_p]

    @property
    def most_probable(self) -> list[tuple[int, float]]:
        """The most probable first tokens; ``ValueError`` where they are not told by their ids."""
        if self.logprobs.content:
            found = [(token.id, token.logprob) for token in self.logprobs.content[0].top_logprobs]
        else:
            first = (self.logprobs.top_logprobs or [None])[0] or {}
            names = [NAMED.fullmatch(name) for name in first]
            found = [
                (int(name[1]), log_p)
                for name, log_p in zip(names, first.values(), strict=True)
                if name
            ]
        return sorted(found, key=lambda pair: -pair[1])


class Completion(BaseModel):
    """A reply to a request for samples, as far as it is read here."""

    choices: list[Choice]


# --- the engine -----------------------------------------------------------------------------------


class Server(Protocol):
    """What an engine asks, such as `igcore.models.server.Server`.

    Attributes
    ----------
    url : str
        Names it in errors.
    samples : int
        Samples that one request may ask for.
    """

    url: str
    samples: int

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, in their order."""
        ...


class ServedEngine:
    """Samples blocks of tokens from a model in a server, see the module.

    Candidates are numbered as by `igcore.engine.local.LocalEngine`. It has no latents: neither
    ``history`` nor ``steering``.

    Parameters
    ----------
    server : Server
    eos_ids : collection of int
        Tokens that end a sequence. Whatever a server sends after one is dropped.

    Attributes
    ----------
    sequences : list of list of int
        The token ids of each row so far, those of its prompt first.
    """

    def __init__(self, server: Server, eos_ids: Collection[int]):
        self.server, self.eos_ids = server, frozenset(eos_ids)
        self._start([])

    def _start(self, sequences: list[list[int]]) -> None:
        """Begin a block from these rows."""
        self.sequences = sequences
        self._grown: dict[int, list[int]] = {}  # live candidate of any round -> its sequence
        self._drawn = 0  # number of candidates of all rounds so far

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with prompts, one row each; nothing is sent yet."""
        self._start(list(map(list, prompts)))

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalties: Sequence[Penalty | None] | None = None,
        last: bool = False,
        known: Sequence[Sequence[int]] = (),
    ) -> Block:
        """Sample one continuation of each given row.

        See `igcore.engine.local.LocalEngine.sample_block`; a penalty becomes `bias_of` it.

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
        shares = self._shares(rows, penalties, known, length)
        bodies = []
        for share in shares:
            first = share[0]
            at = len(known[first])
            body = {
                "prompt": self.sequences[rows[first]] + block.tokens[first],
                "max_tokens": length - at,
                "n": len(share),
                "seed": keys[first][at] % SEEDS,
                "logprobs": 1,
                "stop_token_ids": sorted(self.eos_ids),
            }
            if penalty := penalties[first]:
                body["logit_bias"] = bias_of(penalty)
            bodies.append(SAMPLING | body)
        for share, choices in zip(shares, self._choices(bodies), strict=True):
            for c, choice in zip(share, choices, strict=True):
                self._add(block, c, choice, length, penalised=penalties[c] is not None)
        return self._numbered(rows, block, last, length)

    def _shares(
        self,
        rows: Sequence[int],
        penalties: Sequence[Penalty | None],
        known: Sequence[Sequence[int]],
        length: int,
    ) -> list[list[int]]:
        """Return the candidates of each request: those that differ in nothing but their keys."""
        alike: dict[Hashable, list[int]] = {}
        for c, row in enumerate(rows):
            if len(known[c]) < length:
                alike.setdefault((row, id(penalties[c]), tuple(known[c])), []).append(c)
        most = self.server.samples
        cuts = [(group, at) for group in alike.values() for at in range(0, len(group), most)]
        return [group[at : at + most] for group, at in cuts]

    def _add(self, block: Block, c: int, choice: Choice, length: int, penalised: bool) -> None:
        """Append a sample to what is known of a candidate, up to its first end token."""
        try:
            tokens, log_p = choice.sample
            room = length - len(block.tokens[c])
            for token, x in zip(tokens[:room], log_p, strict=False):
                block.append(c, token, x, math.nan if penalised else x, False)
                if token in self.eos_ids:
                    block.ended[c] = True
                    return
            if len(tokens) != room:
                end = f"{tokens[-1:]}, which is no end token of the policy"
                raise ValueError(f"a sample of {len(tokens)} tokens for {room} ends with {end}")
        except ValueError as error:
            raise self._malformed(error) from None

    def _numbered(self, rows: Sequence[int], block: Block, last: bool, length: int) -> Block:
        """Number the candidates of a block on, and keep the sequences of the live ones."""
        for c, row in enumerate(rows):
            tokens = block.tokens[c]
            # as many as a local model would read: neither an end token nor the last of a response
            unread = block.ended[c] or (last and len(tokens) == length)
            block.encoded[c] = len(tokens) - unread
            if not block.ended[c]:
                self._grown[self._drawn + c] = self.sequences[row] + tokens
        self._drawn += len(rows)
        return block

    def _choices(self, bodies: Sequence[dict[str, Any]]) -> list[list[Choice]]:
        """Return the samples that each request gives, in their order."""
        found = []
        for body, content in zip(bodies, self.server.complete(bodies), strict=True):
            try:
                choices = Completion.model_validate_json(content).choices
                choices.sort(key=lambda choice: choice.index)
                if [choice.index for choice in choices] != list(range(body["n"])):
                    raise ValueError(f"it has not the {body['n']} samples that were asked for")
            except ValueError as error:
                raise self._malformed(error) from None
            found.append(choices)
        return found

    def _malformed(self, error: ValueError) -> PolicyError:
        """Return the error for a reply that cannot be used."""
        why = " ".join(str(error).split())[:200]
        return PolicyError(
            f"the server at {self.server.url} gave a reply that is no completion with token ids "
            f"and their log-probabilities ({why}); serve the model with vLLM, SGLang or "
            "llama.cpp's server"
        )

    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each row, the most probable first.

        See `igcore.engine.local.LocalEngine.propose`.

        Raises
        ------
        PolicyError
            When the server does not give so many.
        """
        one = {"max_tokens": 1, "n": 1, "seed": 0, "logprobs": k}
        bodies = [SAMPLING | one | {"prompt": self.sequences[row]} for row in rows]
        block = Block.empty(self._drawn, len(rows) * k)
        for i, (choice,) in enumerate(self._choices(bodies)):
            best = choice.most_probable[:k]
            if len(best) < k:
                raise PolicyError(
                    f"the server at {self.server.url} gave {len(best)} of the {k} most probable "
                    "tokens by their ids; lower top_k, or serve the model with vLLM or llama.cpp's "
                    "server"
                )
            for c, (token, log_p) in enumerate(best, start=i * k):
                block.append(c, token, log_p, log_p, False)
                block.ended[c] = token in self.eos_ids
        block = self._numbered([row for row in rows for _ in range(k)], block, False, 1)
        block.encoded = [0] * len(block.tokens)  # a proposed token is read when it is taken
        return block

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
        self._start([self._grown[c] for c in candidates])


def bias_of(penalty: Penalty) -> dict[str, float]:
    """Return the bias (nats) on each token that a penalty makes less likely at any position.

    Raises
    ------
    ParameterError
        For a penalty that depends on the tokens before: no constant bias stands for it.
    """
    if penalty.after is not None:
        raise ParameterError(
            "a server cannot apply a penalty that changes from token to token; set diversity to "
            "half, paper or none"
        )
    bias: dict[str, float] = {}
    for factors in penalty.factors.values():
        for token, factor in factors.items():
            nats = max(math.log(factor), -BAN) if factor > 0 else -BAN
            bias[str(token)] = min(nats, bias.get(str(token), 0.0))
    return bias
