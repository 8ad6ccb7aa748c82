"""ARGS (Khanov et al., 2024), a baseline of the paper: the best of the k most probable tokens.

At every position the policy proposes its k most probable tokens. The scorers score the text with
each of them, and ARGS takes the token with the lowest

    -omega pi(token) + score of the text

The score is c_task (`args`), c_task + lambda C (`args-lagrangian`) or C (`args-cost`). ARGS does
not look ahead and never abstains.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from igcore import ParameterError, SearchConfig
from igcore.beams import Beam, lagrangian, task_cost
from igcore.candidates import Candidate, candidates_of
from igcore.engine.block import Block
from igcore.engine.local import LocalEngine
from igcore.engine.sampling import AS_IS, NEAR_TIE, Sampling, check_finite
from igcore.methods import PENALISED, Method
from igcore.search import Batch, answers, ask_reward, charge_costs, go_on, open_searches
from igcore.verdict import Emission

from ..settings import ArgsConfig, upcast_settings


def args(batch: Batch) -> list[Emission]:
    """Decode token by token with ARGS (paper, section 6, Baselines; settings in appendix D).

    Returns
    -------
    list of Emission
        One per prompt, in their order.

    Raises
    ------
    ParameterError
        When the vocabulary has fewer than `token_top_k` tokens.
    ScorerError, PolicyError
        As `igcore.search.guarded_beam_search`.
    """
    config = batch.config
    assert isinstance(config, ArgsConfig)  # see `one_token`
    engine = batch.engine
    assert isinstance(engine, LocalEngine)  # a policy in a server refuses the method
    open_searches(batch)
    position = 0
    while going := [search for search in batch.searches if search.live]:
        beams = [search.live[0] for search in going]  # ARGS keeps one beam per prompt
        with batch.work.timed("generate"):
            block = propose(engine, [beam.row for beam in beams], config.token_top_k)
        pairs = list(zip(going, beams, strict=True))
        candidates = candidates_of(
            batch.policy, block, [pair for pair in pairs for _ in range(config.token_top_k)]
        )
        charge_costs(batch, candidates)
        ask_reward(batch, candidates)
        batch.work.saw_round(position, 0, candidates)

        for i, search in enumerate(going):
            own = candidates[i * config.token_top_k : (i + 1) * config.token_top_k]
            weights = [weigh(batch, candidate) for candidate in own]
            # of a tie the more probable token: proposals come in that order
            search.beams = [own[weights.index(min(weights))].beam]
            batch.work.saw_block(search)
        if chosen := [search.live[0] for search in going if search.live]:
            with batch.work.timed("generate"):
                read_chosen(engine, chosen, config.token_top_k)
        go_on(batch)
        for search in going:  # a proposed token is read only when it is taken
            batch.work.saw_read(search, len(search.live))
        position += 1
    return answers(batch, batch.searches)


@torch.inference_mode()
def propose(engine: LocalEngine, rows: Sequence[int], k: int) -> Block:
    """Return the k most probable next tokens of each row of an engine, the most probable first.

    Each is a candidate of one token, k of them to a row. Nothing is sampled, and the model reads
    no token before it is chosen, see `read_chosen`.

    Raises
    ------
    ParameterError
        When the vocabulary has fewer than k tokens.
    PolicyError
        When a logit is not finite.
    """
    # a copy, into which the near ties are written
    log_p = engine.rows.logits[list(rows)].log_softmax(-1, dtype=torch.float32)  # (R, V)
    vocabulary = log_p.shape[1]
    if k > vocabulary:
        raise ParameterError(
            f"{k} candidates per token were asked of a vocabulary of {vocabulary}; lower "
            "token_top_k"
        )
    check_finite(log_p.amax(1))
    best, ids = log_p.topk(min(k + 1, vocabulary))  # (R, k + 1), the last to see near ties
    # where logits that move by NEAR_TIE could replace the k-th token, float32 reads the row alone
    near = (best[:, k - 1] - best[:, -1] < 2 * NEAR_TIE) & (k < vocabulary)  # (R,)
    for i in near.nonzero()[:, 0].tolist() if engine.redraws else ():
        alone = engine.rows.alone(rows[i], engine.sequences[rows[i]])
        log_p[i] = alone.logits[0].log_softmax(-1, dtype=torch.float32)
        best[i], ids[i] = log_p[i].topk(best.shape[1])
    tokens = ids[:, :k].flatten().tolist()
    values = best[:, :k].flatten().tolist()
    block = Block.empty(0, len(tokens))
    for c, (token, value) in enumerate(zip(tokens, values, strict=True)):
        is_last = (c + 1) % k == 0
        block.append(c, token, value, value, is_last and bool(near[c // k]))
        block.ended[c] = token in engine.eos_ids
    return block


def read_chosen(engine: LocalEngine, chosen: Sequence[Beam], k: int) -> None:
    """Let the model read the last token of chosen beams, which are among k proposals to each row.

    The beams get the numbers of candidates of the engine.
    """
    unused = [[0] for _ in chosen]  # keys: no token is sampled
    known = [beam.tokens[-1:] for beam in chosen]
    block = engine.sample_block([beam.row // k for beam in chosen], unused, known=known)
    for c, beam in enumerate(chosen):
        beam.row = block.first + c


def weigh(batch: Batch, candidate: Candidate) -> float:
    """Return -omega pi(token) + score, by which a token is chosen: lower is better.

    It is infinite where a scorer failed.
    """
    if candidate.beam.broken:  # not left to the sum, where 0 * inf would be NaN
        return math.inf
    config = batch.config
    assert isinstance(config, ArgsConfig)  # see `one_token`
    score: Any = batch.method.score(candidate.beam, config)  # none of the tuples of others
    weighed: float = score - config.policy_weight * math.exp(candidate.log_p[0])
    return weighed


# --- methods --------------------------------------------------------------------------------------


def safety_cost(beam: Beam, config: SearchConfig) -> float:
    """Return C, the cost model's score of the text so far; infinite when a scorer failed."""
    return math.inf if beam.broken else beam.cost


def one_token(config: SearchConfig) -> ArgsConfig:
    """Return settings under which each block is one of the `token_top_k` proposed tokens."""
    if Sampling.of(config) != AS_IS:
        raise ParameterError(
            "ARGS does not sample with temperature, top_p and top_k; leave them out, and set "
            "token_top_k, the number of its proposals"
        )
    own: ArgsConfig = upcast_settings(ArgsConfig, config)
    return replace(own, n_samples=own.token_top_k, block_size=1, keep=1, rounds=1)


def one_token_without_cost(config: SearchConfig) -> ArgsConfig:
    """Return the same with no weight on the cost."""
    return replace(one_token(config), lagrange_multiplier=0.0)


ARGS_LAGRANGIAN = Method(lagrangian, one_token, search=args, reads=PENALISED)
ARGS = replace(ARGS_LAGRANGIAN, score=task_cost, settings=one_token_without_cost, cost=False)
ARGS_COST = replace(ARGS_LAGRANGIAN, score=safety_cost, reward=False)
