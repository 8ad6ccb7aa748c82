"""Ask the policy whether it gave an answer: each recorded token must be the one that its key draws.

The policy reads a prompt with its recorded answer once. The probabilities after each token say
which uniform numbers draw the next one, and the keys of the request give these numbers. So one pass
decides, on any machine, and what a record says of its origin plays no part.

The caller loads the policy, see `igstudy.runs.verify`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from igcore import Policy, SearchConfig
from igcore.beams import Beam
from igcore.budget import start
from igcore.candidates import before_stop
from igcore.engine.agreement import dtype_of
from igcore.engine.device import device_of
from igcore.engine.kv_cache import forward, inputs_of, padded
from igcore.engine.prepack import use_prepacked
from igcore.engine.sampling import Sampling, random_key, uniforms
from igcore.methods import method_of
from igcore.verdict import emission_of

from ..linefile import Fields
from .drawn import edges_of, moved_by, moves_of
from .rescore import close, differing_fields

Numbers = npt.NDArray[np.float64]
# of what logits may move, the part that all tokens of an answer may take on average: .01 in SmolLM2
# in bfloat16, .7 where it was sampled at temperature 1.4
STRAIN = 1 / 16
STEERED = "its method changes the policy's logits by itself"
STOPPED = "it may end at a stop string that the policy has not been asked for"
PENALISED = "a round with a penalty, which the record does not hold, may have drawn its tokens"


class NotDecided(Exception):
    """One pass cannot say whether the policy gave an answer; the message says why."""


@dataclass(frozen=True)
class Question:
    """A recorded answer, and what the request says of it.

    Attributes
    ----------
    policy : Policy
    ids : sequence of int
        The prompt's, as the policy reads it.
    line : dict
        The record, with its texts.
    config : SearchConfig
        The settings that its method runs under.
    seed, grid : int
        Of the run; policy tokens between the prefixes at which every method is measured.
    """

    policy: Policy
    ids: Sequence[int]
    line: Fields
    config: SearchConfig
    seed: int
    grid: int

    @property
    def stepwise(self) -> bool:
        """Whether its method draws one sample at a time."""
        return method_of(self.line["method"]).stepwise

    @property
    def draw_size(self) -> int:
        """Tokens of one draw; the last ones may be fewer."""
        return int(self.config.step or 0) if self.stepwise else self.config.block_size

    @property
    def ended(self) -> bool:
        """Whether its tokens are those of a whole answer; stop strings are left aside."""
        whole = len(self.line["tokens"]) == self.config.max_new_tokens
        return whole or self.line["tokens"][-1] in self.policy.eos_ids

    @property
    def stopped(self) -> bool:
        """Whether a block of it may have been cut at a stop string."""
        return bool(self.config.stop) and not self.stepwise and not self.ended

    @property
    def truncated(self) -> bool:
        """Whether it is the beginning of an answer, where the request allows one."""
        allowed = self.config.on_failure == "truncate" and self.line["reason"] == "truncated"
        return allowed and len(self.line["tokens"]) % self.draw_size == 0


def ask(question: Question, read: Callable[[Question], Tensor] | None = None) -> Iterator[str]:
    """Yield why the policy cannot have given an answer; nothing if it has drawn every token.

    Parameters
    ----------
    read : callable, optional
        Returns the logits of an answer; by default `logits_of`.

    Raises
    ------
    NotDecided
        When one pass cannot tell.
    PolicyError
        When the policy's logits are not finite.
    """
    method = method_of(question.line["method"])
    if method.search and not method.stepwise:
        raise NotDecided(STEERED)
    if not question.line["tokens"]:
        if question.line["status"] != "abstained":
            yield "its text has no tokens, as only an abstention has none"
        return
    if odd := check_tokens(question):
        yield odd
        return
    yield from compare_text(question)
    logits = (read or logits_of)(question)
    if question.line["reward_scorer"] is None:
        yield from compare_likelihood(question, logits)
    yield from find_undrawn(question, logits)
    if question.stopped:
        raise NotDecided(STOPPED)


def check_tokens(question: Question) -> str:
    """Say why no answer has such tokens; return "" where one may."""
    tokens, policy = question.line["tokens"], question.policy
    vocabulary = policy.model.config.get_text_config(decoder=True).vocab_size
    most = question.config.max_new_tokens
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        return f"its tokens are not all whole numbers from 0 to {vocabulary - 1}"
    if len(tokens) > most:
        return f"it has {len(tokens)} tokens, more than max_new_tokens, {most}"
    if not policy.eos_ids.isdisjoint(tokens[:-1]):
        return "its tokens go on behind an end token"
    return ""


def compare_text(question: Question) -> Iterator[str]:
    """Yield what a record says of an answer and its tokens do not."""
    line, config, policy = question.line, question.config, question.policy
    tokens = line["tokens"]
    n, size = len(tokens), config.block_size
    written = policy.text(tokens)
    if question.stopped:
        if not written.startswith(line["response"]):
            yield f"its tokens: response is {line['response']!r:.60}, not a part of {written!r:.60}"
        return
    text = before_stop(written, config.stop)
    whole = question.ended or text != written
    if not (whole or question.truncated):
        yield f"its {n} tokens end before an end token, max_new_tokens and a stop string"
    finished = whole and not question.truncated
    blocks = [*range(size, n, size), n]
    beam = Beam(tokens, text, finished, start(config.budget), blocks, row=0)
    emission = emission_of(beam, policy, question.grid)
    ends = {"block_ends": emission.ends, "grid_ends": emission.grid}
    expected = {"response": text, "finished": finished} | ends
    yield from differing_fields("its tokens", line, expected)


def logits_of(question: Question) -> Tensor:
    """Return the logits (n, V) from which each of the n tokens of an answer was drawn."""
    model, tokens = question.policy.model, question.line["tokens"]
    ids, mask = padded([[*question.ids, *tokens[:-1]]], device_of(model))
    inputs = inputs_of(ids, mask) | {"use_cache": False, "logits_to_keep": len(tokens)}
    with use_prepacked(model):
        _, logits = forward(model, None, **inputs)
    return logits[0, -len(tokens) :]


def compare_likelihood(question: Question, logits: Tensor) -> Iterator[str]:
    """Yield a sentence unless the recorded reward is the mean log-probability of the tokens."""
    index = torch.tensor(question.line["tokens"], device=logits.device)[:, None]
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(1, index)
    reward = float(log_p.mean())
    # a log-probability moves by its logit and by the sum of all
    most = 2 * float(moves_of(logits, dtype_of(question.policy.model)).mean())
    if not close(question.line["reward"], reward, most):
        yield f"its reward is {question.line['reward']!r:.60}, not its log-likelihood {reward:.6f}"


def find_undrawn(question: Question, logits: Tensor) -> Iterator[str]:
    """Yield a sentence for the first block that none of the allowed draws gives.

    Raises
    ------
    NotDecided
        Where a round with a penalty may have drawn it.
    """
    config, tokens, size = question.config, question.line["tokens"], question.draw_size
    index = torch.tensor(tokens, device=logits.device)
    most = moves_of(logits, dtype_of(question.policy.model))
    edges = edges_of(logits, index, most, Sampling.of(config))
    room = most.cpu().numpy()
    strains = {0: 0.0}  # by the last draw, the least sum over the blocks so far
    for number, at in enumerate(range(0, len(tokens), size)):
        block = slice(at, at + size)
        named = rounds_of(question, number)
        taken = {
            draw: least_before(strains, draw, question.stepwise)
            + measure_strain(question, edges[block], room[block], draw, at)
            for draw in named
        }
        strains = {draw: strain for draw, strain in taken.items() if strain < math.inf}
        if not strains:
            if any(named) and not question.stepwise and config.diversity != "none":
                raise NotDecided(PENALISED)
            yield (
                f"its tokens {at + 1} to {min(at + size, len(tokens))} are not those that the "
                f"keys of the request draw, in any of the draws {named} that its trace names"
            )
            return
    if (strain := min(strains.values())) > 1 + STRAIN * len(tokens):
        yield (
            "its tokens are near those that the keys of the request draw, but on the whole logits "
            f"would have moved {strain / len(tokens):.2g} of the most that they move"
        )


def least_before(strains: Mapping[int, float], draw: int, stepwise: bool) -> float:
    """Return the least strain of the blocks before one of a draw."""
    # the draws of a stepwise search follow one another; another one counts them by block
    allowed = [strain for n, strain in strains.items() if n <= draw or not stepwise]
    return min(allowed, default=math.inf)


def rounds_of(question: Question, number: int) -> list[int]:
    """Return the draws of a block, or its rounds, that the trace names and the request allows."""
    config = question.config
    most: float = config.rounds
    if question.stepwise:
        most = min(config.spend or 0, config.draws or math.inf)
    # where one answer is emitted in any case, its last draw goes on to the end in one piece
    whole = question.stepwise and config.on_failure == "paper"
    blocks = range(number + 1) if whole else [number]
    named = {entry["round"] for entry in question.line["trace"] if entry["block"] in blocks}
    # an int alone: in a key 0.0 and False are other numbers
    return sorted(draw for draw in named if type(draw) is int and 0 <= draw < most)


def measure_strain(question: Question, edges: Numbers, room: Numbers, draw: int, at: int) -> float:
    """Return by how much logits have moved if a draw or a round has given the block at a token.

    It is the sum over the tokens, (T, levels, 2) and (T,), of the part of `room` that is taken, by
    the sample of the round that takes least; infinite where all of them take more than there is.
    """
    config, line, places = question.config, question.line, range(at, at + len(room))
    least = math.inf
    for sample in range(config.choices if question.stepwise else config.n_samples):
        keys = [random_key(question.seed, line["prompt_id"], draw, sample, t) for t in places]
        taken = moved_by(edges, uniforms(keys), Sampling.of(config)) / room
        if (taken <= 1).all():
            least = min(least, float(taken.sum()))
    return least
