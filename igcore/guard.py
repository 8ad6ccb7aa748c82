"""The entry point of the package: a guard, `decode` with any method, and the account of its work.

A `Guard` holds everything that a search needs. `decode` checks it once; the modules below it rely
on that.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from .beams import Beam, Method, PromptSearch, imported, method_of, new_search
from .config import SearchConfig
from .engine.device import free_bytes
from .engine.local import LocalEngine
from .engine.memory import (
    CRITIC_ROWS,
    batch_size,
    critic_bytes,
    halving,
    search_bytes,
    session_bytes,
)
from .engine.prepack import missing_bytes, packed
from .errors import ParameterError
from .policy import Encoded, Policy, Prompt, as_prompt
from .scorers import Scorer, Scoring, carries, check_sign
from .search import Batch, Candidate
from .verdict import Counts, Emission, Response, measure


@dataclass(frozen=True)
class Guard:
    """What decodes: a frozen policy, its cost and reward model, a critic, and the settings.

    Attributes
    ----------
    policy : Policy
    cost, reward : Scorer
        Cost (higher is worse) and reward (higher is better). Every method is measured by both,
        whatever it searches with.
    config : SearchConfig
    critic : Critic or ValueNetwork, optional
        For the methods that need one; the others ignore it. Any object with ``watch``,
        ``reads_keys`` and ``judge`` as `igcore.critic.network.Critic` has them, or for RE-Control
        with ``steering`` as `igcore.baselines.re_control.ValueNetwork` has it. Whatever it
        predicts, a guarded method emits only text that has passed the final check.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign.
    """

    policy: Policy
    cost: Scorer
    reward: Scorer
    config: SearchConfig
    critic: object | None = None

    def __post_init__(self):
        check_sign(self.reward, "reward")
        check_sign(self.cost, "cost")

    def under(self, name: str) -> Guard:
        """Return the guard with the settings that a method runs under.

        Raises
        ------
        ParameterError
            For an unknown method, a missing critic or value network, or one that was trained for
            something else.
        """
        method = method_of(name)
        guard = replace(self, config=method.settings(self.config))
        check_network(name, method, guard)
        return guard


def check_network(name: str, method: Method, guard: Guard) -> None:
    """Refuse a missing critic or value network, and one that was trained for something else."""
    if not method.network:
        return
    if guard.critic is None:
        raise ParameterError(
            f"method {name!r} asks a {method.network}; train one with notebook 20 and give it to "
            "Guard as critic="
        )
    spec = getattr(guard.critic, "spec", None)
    if spec is None:  # the user's own object, which does not say what it was trained for
        return
    if spec.KIND != method.network:
        raise ParameterError(
            f"method {name!r} asks a {method.network}, but critic= gives it a {spec.KIND}; give it "
            f"a {method.network}"
        )
    spec.check_scorers(guard.policy, guard.cost, guard.reward)
    spec.check_settings(name, guard.config)


def decode(
    method: str,
    guard: Guard,
    prompts: Iterable[str | Prompt],
    *,
    seed: int = 0,
    on_block: Callable[[Prompt, Sequence[Beam]], None] | None = None,
    memory_gb: float | None = None,
) -> Iterator[Response]:
    """Answer prompts with one method.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    guard : Guard
    prompts : iterable of str or Prompt
        Decoded together in groups of ``config.group_size``, in this order. The policy encodes their
        text, except for an `Encoded`.
    seed : int
        Together with (prompt, round, beam, position) it decides every token.
    on_block : callable, optional
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed,
        with the beams kept, best first; it must not change them. The answer will continue one of
        them. They may be unsafe under a method without a final check, or where costs are known only
        at the end.
    memory_gb : float, optional
        Memory for KV caches and logits, in GiB. Fewer prompts are decoded together where they would
        exceed it, see `igcore.engine.memory`. By default most of what is free. If memory runs out
        all the same, the batch is halved.

    Yields
    ------
    Response
        In the order of the prompts, as each group finishes.

    Raises
    ------
    ParameterError
        Before anything is decoded: for an unknown method, no prompt, an empty or too long prompt, a
        missing critic or one that was trained for something else, or too little memory for one
        prompt.
    ScorerError
        When a scorer fails for every text of a group.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    resolved, how = guard.under(method), method_of(method)
    if isinstance(prompts, str):  # it would be read as one prompt per letter
        raise ParameterError(
            f"prompts is the text {prompts[:40]!r}; give a list of prompts, even of one"
        )
    # a seed is hashed as text, so 0, 0.0 and False would give three different answers
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    prompts = [as_prompt(prompt) for prompt in prompts]
    if not prompts:
        raise ParameterError("there are no prompts; give at least one")
    policy, length = guard.policy, guard.config.max_new_tokens
    # all prompts are encoded first, so that a prompt that is too long is refused before any work
    ids = [
        list(p.ids) if isinstance(p, Encoded) else policy.encode(p.text, length) for p in prompts
    ]
    room = room_for(how, resolved, max(map(len, ids)), memory_gb)  # prompts that fit at once

    def work(pairs: Sequence[tuple[Prompt, list[int]]]) -> list[Response]:
        """Answer one group of prompts; `halving` may call it again with a smaller group."""
        searches = [
            new_search(prompt, tokens, row, how, resolved.config)
            for row, (prompt, tokens) in enumerate(pairs)
        ]
        with packed(policy.model, *readers_of(guard)):
            account = Work(how, resolved.config, on_block)
            # measured at the user's block size: a method may change its own (Best-of-N has one
            # block), and peak costs are only comparable on one grid
            batch = open_batch(resolved, how, searches, seed, account, guard.config.block_size)
            emissions = imported(how.search)(batch)
            return responses(batch, emissions)

    pairs = list(zip(prompts, ids, strict=True))
    return halving(pairs, min(guard.config.group_size, room), work)


def readers_of(guard: Guard) -> set:
    """Return the language models behind the scorers that keep a KV cache."""
    # a set: cost and reward model may share a backbone, which takes memory once
    return {scorer.backbone.model for scorer in (guard.reward, guard.cost) if carries(scorer)}


def room_for(method: Method, guard: Guard, prompt_tokens: int, memory_gb: float | None) -> int:
    """Return how many prompts fit at once: the least over the devices of all models."""
    model, config = guard.policy.model, guard.config
    needed = {model: search_bytes(model, config, prompt_tokens, guard.policy.cache)}
    if method.asks_critic and guard.critic.reads_keys:
        rows = min(CRITIC_ROWS, config.n_samples)
        needed[model] += critic_bytes(model, rows, config.max_new_tokens)
    for reader in readers_of(guard):
        # added and not set: a scorer may read with the policy's own model
        carried = session_bytes(reader, config, prompt_tokens)
        needed[reader] = needed.get(reader, 0) + carried
    sizes = []
    for device in {model.device for model in needed}:
        models = [model for model in needed if model.device == device]
        # prepacked copies of the weights are made later, when decoding starts: leave room for them
        free = free_bytes(device) - missing_bytes(*models)
        sizes.append(batch_size(sum(needed[model] for model in models), free, memory_gb))
    return min(sizes)


def open_batch(
    guard: Guard, method: Method, searches: list[PromptSearch], seed: int, work: Work, grid: int
) -> Batch:
    """Return what a search function works with: the searches, a new engine and the scorers."""
    prompts = [search.prompt.text for search in searches]
    with work.timed("cost"):  # scorers with a KV cache prefill the prompts now
        # a method may ask for the score of its first finished answer alone, so that one failure
        # proves nothing before n_samples texts have failed
        scoring = Scoring(guard.cost, guard.reward, prompts, guard.config.n_samples)
    policy = guard.policy
    # the engine keeps a middle layer's output only for a critic that reads it
    watch = guard.critic.watch if method.asks_critic else None
    engine = LocalEngine(policy.model, policy.eos_ids, policy.cache, watch)
    return Batch(guard, method, searches, engine, scoring, seed, work, grid)


def responses(batch: Batch, emissions: Sequence[Emission]) -> list[Response]:
    """Return the answers with their metrics and the account of the work for them."""
    prompts = [search.prompt for search in batch.searches]
    scorers = batch.scoring.reported
    metrics = measure(emissions, prompts, scorers["reward"], scorers["cost"], batch.config)
    # prompts are decoded together, so their seconds cannot be told apart: equal shares
    seconds = {part: s / len(prompts) for part, s in batch.work.seconds.items()}
    out = []
    for search, emission, metric in zip(batch.searches, emissions, metrics, strict=True):
        report = batch.work.reports[search]
        out.append(
            Response(
                prompt_id=search.prompt.id,
                prompt=search.prompt.text,
                set_name=search.prompt.set_name,
                text=emission.text,
                status=emission.status,
                reason=emission.reason,
                finished=emission.finished,
                n_tokens=emission.n_tokens,
                reward=metric.reward,
                cost=metric.cost,
                peak_cost=metric.peak_cost,
                fail_open_cost=fail_open_cost(batch, search, emission),
                z_trace=metric.z_trace,
                block_ends=emission.ends,
                grid_ends=emission.grid,
                counts=report.counts,
                trace=report.trace,
                finals=report.finals,
                generate_s=seconds["generate"],
                cost_s=seconds["cost"],
                reward_s=seconds["reward"],
                critic_s=seconds["critic"],
                tokens=emission.tokens,
            )
        )
    return out


def fail_open_cost(batch: Batch, search: PromptSearch, emission: Emission) -> float | None:
    """Return the cost of what would have been emitted without abstention.

    None when the search stopped before that was known.
    """
    if emission.status != "abstained" and emission.reason != "truncated":
        return emission.cost
    if search.stopped:  # not searched for, see `SearchConfig.probe_fail_open`
        return None
    cost = batch.scoring.search["cost"]
    return float(cost.score([search.prompt.text], [search.best.text], [True])[0])


# --- the account of the work ----------------------------------------------------------------------


@dataclass
class Report:
    """The work done for one prompt; the fields are those of `Response`."""

    counts: Counts = field(default_factory=Counts)
    trace: list[dict] = field(default_factory=list)
    finals: list[list[float | None]] = field(default_factory=list)


class Work:
    """Observes a search: counts its work, traces its rounds and measures its time.

    It decides nothing. Work that a search does after it has failed (``probe_fail_open``) is not
    counted; its seconds are.

    Attributes
    ----------
    reports : dict of PromptSearch to Report
    seconds : dict of str to float
        By part: ``generate``, ``cost``, ``reward`` and ``critic``.
    """

    def __init__(self, method: Method, config: SearchConfig, on_block: Callable | None = None):
        self.method, self.config, self.on_block = method, config, on_block
        # keyed by the identity of the search: two prompts may be equal
        self.reports: dict[PromptSearch, Report] = defaultdict(Report)
        self.seconds = {"generate": 0.0, "cost": 0.0, "reward": 0.0, "critic": 0.0}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a with-block to a part."""
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def saw_read(self, search: PromptSearch, n_tokens: int) -> None:
        """Count tokens that the policy has read outside of `sample_block`."""
        self.reports[search].counts.forward_tokens += n_tokens

    def saw_scored(self, candidates: Sequence[Candidate]) -> None:
        """Count texts given to a scorer, before its cache."""
        for candidate in candidates:
            if not candidate.search.failure:
                counts = self.reports[candidate.search].counts
                counts.scorer_calls += 1
                counts.scorer_tokens += len(candidate.beam.tokens)

    def saw_round(self, block: int, round_: int, candidates: Sequence[Candidate]) -> None:
        """Count and trace one round of one block."""
        by_search: dict[PromptSearch, list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            by_search[candidate.search].append(candidate)
        for search, own in by_search.items():
            if not search.failure:
                self._note(self.reports[search], block, round_, own)

    def _note(self, report: Report, block: int, round_: int, own: Sequence[Candidate]) -> None:
        """Add one prompt's candidates of a round to its report."""
        log_p = [x for candidate in own for x in candidate.log_p]
        log_q = [x for candidate in own for x in candidate.log_q]
        beams = [candidate.beam for candidate in own]
        finals = [beam for beam in beams if beam.finished]
        report.counts.samples_drawn += len(own)
        report.counts.policy_tokens += len(log_p)
        report.counts.forward_tokens += sum(candidate.encoded for candidate in own)
        report.counts.rounds_used += 1
        report.counts.near_ties += sum(candidate.near_ties for candidate in own)
        report.finals += [self._final_scores(beam) for beam in finals]
        passed = sum(beam.passes(self.config) for beam in beams)
        safe_finals = sum(beam.safe(self.config) for beam in finals)
        report.trace.append(
            {
                "block": block,
                "round": round_,
                "drawn": len(own),
                # without a cost nothing is known about safety, and 0 would look like knowledge
                "safe": passed if self.method.cost else None,
                "finals": len(finals),
                "safe_finals": safe_finals if self.method.cost else None,
                # the samples come from q, so the mean of log q - log p estimates KL(q || p)
                "kl": (sum(log_q) - sum(log_p)) / len(own),
                "perplexity": perplexity(log_p),
            }
        )

    def _final_scores(self, beam: Beam) -> list[float | None]:
        """Return reward and cost of a finished candidate; None for what was not computed."""
        # a safety-first method scores the reward of passing candidates only, see `ask_reward`
        has_reward = self.method.reward and (
            not self.method.safety_first or beam.passes(self.config)
        )
        pairs = ((beam.reward, has_reward), (beam.cost, self.method.cost))
        return [x if known and math.isfinite(x) else None for x, known in pairs]

    def saw_block(self, search: PromptSearch) -> None:
        """Call `on_block` with the beams kept after a block."""
        if self.on_block and not search.failure:
            self.on_block(search.prompt, search.beams)

    def saw_check(self, search: PromptSearch, emission: Emission) -> None:
        """Count the final check of a guarded search."""
        if search.gated:  # a baseline would have run without the check, which only labels its text
            counts = self.reports[search].counts
            counts.scorer_calls += emission.gate_calls
            counts.scorer_tokens += emission.gate_tokens


def perplexity(log_p: Sequence[float]) -> float:
    """Return exp of the mean of -log p; infinite where that exceeds every float."""
    mean = -sum(log_p) / len(log_p)
    # math.exp would raise for tokens that the policy all but excludes
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf
