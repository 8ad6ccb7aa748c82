"""The front of the package: a guard, `decode` with any of the methods, and the account of its work.

A `Guard` holds everything that a search needs. Whatever is below receives it; nothing is checked or
resolved a second time.
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
        For the methods that need one; others leave it alone. Any object with ``watch``,
        ``reads_keys`` and ``judge`` as `igcore.critic.network.Critic` has them, or for RE-Control
        with ``steering`` as `igcore.baselines.re_control.ValueNetwork` has it. Whatever it says, a
        guarded method emits nothing that has not passed the final check of the cost model.

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
            For an unknown method, one without the critic that it needs, or with a critic that was
            trained for something else.
        """
        method = method_of(name)
        guard = replace(self, config=method.settings(self.config))
        check_network(name, method, guard)
        return guard


def check_network(name: str, method: Method, guard: Guard) -> None:
    """Refuse a missing critic or value network, and one that was trained for something else.

    One without a ``spec`` does not say what it was trained for and is believed.
    """
    if not method.network:
        return
    if guard.critic is None:
        raise ParameterError(
            f"method {name!r} asks a {method.network}; train one with notebook 20 and give it to "
            "Guard as critic="
        )
    spec = getattr(guard.critic, "spec", None)
    if spec is None:
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
    """Answer prompts with one method, in their order.

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
        with the beams kept, best first. All that follows, and the answer, continues one of them.
        Without a final check they need not be safe, and where costs are known only at the end
        nobody has looked. Not to be changed.
    memory_gb : float, optional
        Memory for KV caches and logits, in GiB; fewer prompts are decoded together where it would
        be exceeded, see `igcore.engine.memory`. By default most of what is free. Where memory runs
        out all the same, the batch is halved.

    Yields
    ------
    Response
        As each group finishes.

    Raises
    ------
    ParameterError
        Before anything is decoded: unknown method, no prompt, an empty or too long prompt, a method
        without the critic that it needs or with one trained for something else, too little memory
        for one prompt.
    ScorerError
        When a scorer fails for every text of a group.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    resolved, how = guard.under(method), method_of(method)
    if isinstance(prompts, str):
        raise ParameterError(
            f"prompts is the text {prompts[:40]!r}; give a list of prompts, even of one"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    prompts = [as_prompt(prompt) for prompt in prompts]
    if not prompts:
        raise ParameterError("there are no prompts; give at least one")
    policy, length = guard.policy, guard.config.max_new_tokens
    ids = [
        list(p.ids) if isinstance(p, Encoded) else policy.encode(p.text, length) for p in prompts
    ]
    room = room_for(how, resolved, max(map(len, ids)), memory_gb)

    def work(pairs: Sequence[tuple[Prompt, list[int]]]) -> list[Response]:
        searches = [
            new_search(prompt, tokens, row, how, resolved.config)
            for row, (prompt, tokens) in enumerate(pairs)
        ]
        with packed(policy.model, *readers_of(guard)):
            account = Work(how, resolved.config, on_block)
            # measured in the user's blocks, whatever blocks the method searches in
            batch = open_batch(resolved, how, searches, seed, account, guard.config.block_size)
            emissions = imported(how.search)(batch)
            return responses(batch, emissions)

    pairs = list(zip(prompts, ids, strict=True))
    return halving(pairs, min(guard.config.group_size, room), work)


def readers_of(guard: Guard) -> set:
    """Return the language models by which scorers read."""
    return {scorer.backbone.model for scorer in (guard.reward, guard.cost) if carries(scorer)}


def room_for(method: Method, guard: Guard, prompt_tokens: int, memory_gb: float | None) -> int:
    """Return how many prompts fit at once, on the device with the least room for its models."""
    model, config = guard.policy.model, guard.config
    needed = {model: search_bytes(model, config, prompt_tokens, guard.policy.cache)}
    if method.asks_critic and guard.critic.reads_keys:
        rows = min(CRITIC_ROWS, config.n_samples)
        needed[model] += critic_bytes(model, rows, config.max_new_tokens)
    for reader in readers_of(guard):
        carried = session_bytes(reader, config, prompt_tokens)
        needed[reader] = needed.get(reader, 0) + carried
    sizes = []
    for device in {model.device for model in needed}:
        models = [model for model in needed if model.device == device]
        free = free_bytes(device) - missing_bytes(*models)
        sizes.append(batch_size(sum(needed[model] for model in models), free, memory_gb))
    return min(sizes)


def open_batch(
    guard: Guard, method: Method, searches: list[PromptSearch], seed: int, work: Work, grid: int
) -> Batch:
    """Return what a search function works with: fresh searches, an engine and the scorers."""
    prompts = [search.prompt.text for search in searches]
    with work.timed("cost"):  # scorers that carry a KV cache read the prompts now
        scoring = Scoring(guard.cost, guard.reward, prompts, guard.config.n_samples)
    policy = guard.policy
    watch = guard.critic.watch if method.asks_critic else None
    engine = LocalEngine(policy.model, policy.eos_ids, policy.cache, watch)
    return Batch(guard, method, searches, engine, scoring, seed, work, grid)


def responses(batch: Batch, emissions: Sequence[Emission]) -> list[Response]:
    """Return the answers with their metrics and the account of the work for them."""
    prompts = [search.prompt for search in batch.searches]
    metrics = measure(emissions, prompts, **batch.scoring.reported, config=batch.config)
    # the work was done for all prompts at once, so each has an equal share of the seconds
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
    """Return the cost of what would have been emitted without a final check.

    None when the search stopped before that was known.
    """
    if emission.status != "abstained" and emission.reason != "truncated":
        return emission.cost
    if search.stopped:
        return None
    cost = batch.scoring.search["cost"]
    return float(cost.score([search.prompt.text], [search.best.text], [True])[0])


# --- the account of the work ----------------------------------------------------------------------


@dataclass
class Report:
    """What was done for one prompt; the fields are those of `Response`."""

    counts: Counts = field(default_factory=Counts)
    trace: list[dict] = field(default_factory=list)
    finals: list[list[float | None]] = field(default_factory=list)


class Work:
    """Observes a search: counts its work, traces its rounds and takes its time; decides nothing.

    Work done after a search has failed, to learn what fail-open would have said, is not counted.

    Attributes
    ----------
    reports : dict of PromptSearch to Report
    seconds : dict of str to float
        By part: ``generate``, ``cost``, ``reward`` and ``critic``.
    """

    def __init__(self, method: Method, config: SearchConfig, on_block: Callable | None = None):
        self.method, self.config, self.on_block = method, config, on_block
        self.reports: dict[PromptSearch, Report] = defaultdict(Report)
        self.seconds = {"generate": 0.0, "cost": 0.0, "reward": 0.0, "critic": 0.0}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def saw_read(self, search: PromptSearch, n_tokens: int) -> None:
        """Count tokens that the policy has read besides those of sampled blocks."""
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
                "safe": passed if self.method.cost else None,
                "finals": len(finals),
                "safe_finals": safe_finals if self.method.cost else None,
                "kl": (sum(log_q) - sum(log_p)) / len(own),
                "perplexity": perplexity(log_p),
            }
        )

    def _final_scores(self, beam: Beam) -> list[float | None]:
        """Return reward and cost of a finished candidate as far as they were asked and known."""
        has_reward = self.method.reward and (
            not self.method.safety_first or beam.passes(self.config)
        )
        pairs = ((beam.reward, has_reward), (beam.cost, self.method.cost))
        return [x if known and math.isfinite(x) else None for x, known in pairs]

    def saw_block(self, search: PromptSearch) -> None:
        """Show the beams kept after a block to whoever asked for them."""
        if self.on_block and not search.failure:
            self.on_block(search.prompt, search.beams)

    def saw_check(self, search: PromptSearch, emission: Emission) -> None:
        """Count the final check of a guarded search; to a baseline it only adds a mark."""
        if search.gated:
            counts = self.reports[search].counts
            counts.scorer_calls += emission.gate_calls
            counts.scorer_tokens += emission.gate_tokens


def perplexity(log_p: Sequence[float]) -> float:
    """Return exp of the mean of -log p.

    Infinite where that exceeds every float, as for tokens that the policy all but excludes.
    """
    mean = -sum(log_p) / len(log_p)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf
