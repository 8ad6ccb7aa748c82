"""One blockwise loop (the paper's Algorithm 1, made consistent): InferenceGuard, beam search and Best-of-N are options of it.

Knows candidates, their scores and their safety states; leaves tokens and keys/values to the engine and text to the policy::

    B <- {prompt}
    repeat until every kept beam is finished:
        pool <- finished beams
        for each round:
            draw n_samples blocks, split evenly over the live beams of B;  score them;  add them to the pool
            stop when one of the pool is safe, and let through by the critic if there is one, else note their tokens as failed
        B <- the best `keep` of the pool
    return the best of B, if it passes the gate
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .budget import SIGNED, charge, start
from .config import SearchConfig
from .critic import Critic
from .critic_spec import check_critic
from .device import free_bytes
from .diversity import DIVERSITIES, Failures
from .engine import Block, Engine
from .errors import ParameterError
from .memory import batch_size, critic_bytes, halving, search_bytes
from .methods import METHODS, RANKS, Beam, settings_of
from .packed import missing_bytes, packed
from .policy import Policy
from .prompts import Prompt, as_prompt
from .response import Counts, Emission, Response, emit, measure
from .sampling import random_key
from .scorers import Cached, Scorer, afresh, check_sign, open_sessions
from .scorers.lm import LMScorer


@dataclass(frozen=True)
class Encoded(Prompt):
    """A prompt that is decoded from given token ids; its text is what scorers see.

    Attributes
    ----------
    ids : tuple of int
        At least one, and short enough for the policy's context.
    """

    ids: tuple[int, ...] = ()


def decode(
    method: str,
    policy: Policy,
    prompts: Iterable[str | Prompt],
    *,
    reward: Scorer,
    cost: Scorer,
    config: SearchConfig,
    critic: Critic | None = None,
    seed: int = 0,
    on_block: Callable[[Prompt, Sequence[Beam]], None] | None = None,
    memory_gb: float | None = None,
) -> Iterator[Response]:
    """Answer prompts with one method, in their order.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    prompts : iterable of str or Prompt
        Decoded together in groups of ``config.group_size``, in this order. The policy encodes their text, except for an `Encoded`.
    reward, cost : Scorer
        Reward (higher is better) and cost (higher is worse). Every method is measured by both, whatever it searches with.
    critic : Critic, optional
        For the methods that ask one; others leave it alone. Any object with ``watch``, ``reads_keys`` and ``judge`` as
        `igcore.critic.Critic` has them. Whatever it says, nothing leaves that has not passed the check of the cost model.
    seed : int
        Together with (prompt, round, beam, position) it decides every token.
    on_block : callable, optional
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed, with the beams kept, best first.
        All that follows, and the answer, continues one of them. Without a gate they need not be safe, and where costs are known
        only at the end nobody has looked. Not to be changed.
    memory_gb : float, optional
        Memory for keys, values and logits, in GiB; fewer prompts are decoded together where it would be exceeded, see
        `igcore.memory`. By default most of what is free. Where memory runs out all the same, the batch is halved.

    Yields
    ------
    Response
        As each group finishes.

    Raises
    ------
    ParameterError
        Before anything is decoded: unknown method, no prompt, an empty or too long prompt, a scorer with the wrong sign, a method
        without the critic that it asks or with one trained for something else, too little memory for one prompt.
    ScorerError
        When a scorer fails for every text of a group.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    settings = settings_of(method, config)
    if isinstance(prompts, str):
        raise ParameterError(f"prompts is the text {prompts[:40]!r}; give a list of prompts, even of one")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    check_sign(reward, "reward"), check_sign(cost, "cost")
    check_critic(method, critic, policy, reward, cost, settings)
    prompts = [as_prompt(p) for p in prompts]
    if not prompts:
        raise ParameterError("there are no prompts; give at least one")
    length = max(len(_encode(policy, prompt, config)) for prompt in prompts)
    readers = {scorer.backbone.model for scorer in (reward, cost) if isinstance(scorer, LMScorer)}
    needed = search_bytes(policy.model, settings, length, policy.cache) + sum(search_bytes(m, settings, length) for m in readers)
    if METHODS[method].asks_critic and critic.reads_keys:
        needed += critic_bytes(policy.model, settings)
    free = free_bytes(policy.model.device) - missing_bytes(policy.model, *readers)
    size = min(config.group_size, batch_size(needed, free, memory_gb))

    def search(batch: Sequence[Prompt]) -> list[Response]:
        with packed(policy.model, *readers):
            return _Search(method, policy, batch, reward, cost, critic, config, settings, seed, on_block).run()

    return halving(prompts, size, search)


def _encode(policy: Policy, prompt: Prompt, config: SearchConfig) -> list[int]:
    return list(prompt.ids) if isinstance(prompt, Encoded) else policy.encode(prompt.text, config.max_new_tokens)


@dataclass
class _Job:
    """The search for one prompt.

    Attributes
    ----------
    failure : str
        Why a gated search has failed; empty while it has not. Work done afterwards is not counted.
    certified : Beam or None
        The best safe beam before the block that failed.
    stopped : bool
        Whether a failed search is not searched on.
    """

    prompt: Prompt
    beams: list[Beam]
    counts: Counts = field(default_factory=Counts)
    trace: list[dict] = field(default_factory=list)
    pool: list[Beam] = field(default_factory=list)
    failed: Failures | None = None
    failure: str = ""
    certified: Beam | None = None
    stopped: bool = False

    @property
    def live(self) -> list[Beam]:
        return [] if self.stopped else [beam for beam in self.beams if not beam.finished]


def split(beams: Sequence[Beam], n: int) -> list[tuple[Beam, int, int]]:
    """Split n samples evenly over beams: one (beam, index among its samples, number of these) per sample."""
    shares = [n // len(beams) + (i < n % len(beams)) for i in range(len(beams))]
    return [(beam, k, share) for beam, share in zip(beams, shares, strict=True) for k in range(share)]


class _Search:
    """The loop for one group of prompts."""

    def __init__(self, method, policy, prompts, reward, cost, critic, config, settings, seed, on_block):
        self.policy, self.config, self.grid, self.seed, self.on_block = policy, settings, config.block_size, seed, on_block
        self.method, self.rank = METHODS[method], RANKS[METHODS[method].rank]
        self.gated = self.method.gated and config.on_failure != "paper"
        self.critic = critic if self.rank.critic else None
        self.seconds = {"generate": 0.0, "cost": 0.0, "reward": 0.0, "critic": 0.0}
        self.raw_cost = afresh(cost)
        with self.clock("cost"):
            carried, self.sessions = open_sessions({"cost": cost, "reward": reward}, [p.text for p in prompts])
        self.scorers = {role: Cached(scorer, settings.n_samples) for role, scorer in carried.items()}
        self.engine = Engine(policy.model, policy.eos_ids, policy.cache, self.critic.watch if self.critic else None)
        root = start(config.budget)
        self.jobs = [_Job(p, [Beam([], "", False, root, [], row)]) for row, p in enumerate(prompts)]

    @contextmanager
    def clock(self, part: str):
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def run(self) -> list[Response]:
        with self.clock("generate"):
            self.engine.open([_encode(self.policy, job.prompt, self.config) for job in self.jobs])
        for job in self.jobs:
            if self.gated and not job.beams[0].safe(self.config):  # strict reading with budget 0
                self.fail(job, "dead_end")
        block = 0
        while jobs := [job for job in self.jobs if job.live]:
            self.block(block, jobs)
            block += 1
        return self.responses()

    def block(self, number: int, jobs: list[_Job]) -> None:
        """Extend every live job by one block and keep its best beams."""
        for job in jobs:
            job.pool = [beam for beam in job.beams if beam.finished]
            job.failed = Failures(self.policy.eos_ids, self.config.diversity_penalty)
        for round_ in range(self.config.rounds):
            asking = [job for job in jobs if round_ == 0 or not any(b.passes(self.config) for b in job.pool)]
            if not asking:
                break
            if round_:
                best = [b for job in jobs for b in self.best_first(self.eligible(job))[: self.config.keep]]
                self.engine.rollback(keep=[b.row for b in best if not b.finished])
            self.round(number, round_, asking)
        for job in jobs:
            self.keep(job)
            if self.on_block and not job.failure:
                self.on_block(job.prompt, job.beams)
        survivors = [(job.prompt.text, beam) for job in self.jobs for beam in job.live]
        with self.clock("generate"):
            self.engine.select([beam.row for _, beam in survivors])
        with self.clock("cost"):
            for session in self.sessions:
                session.retain([prompt for prompt, _ in survivors], [beam.text for _, beam in survivors])
        for row, (_, beam) in enumerate(survivors):
            beam.row = row

    def round(self, number: int, round_: int, jobs: list[_Job]) -> None:
        """Draw and score one round of candidates and add them to the pools of their jobs."""
        drawn = [(job, beam, k, n) for job in jobs for beam, k, n in split(job.live, self.config.n_samples)]
        numbers = [i for job in jobs for i in range(self.config.n_samples)]  # of the sample within its prompt's round
        at = len(drawn[0][1].tokens)  # live beams have all the same length
        length = min(self.config.block_size, self.config.max_new_tokens - at)
        keys = [
            [random_key(self.seed, job.prompt.id, round_, i, at + t) for t in range(length)]
            for (job, *_), i in zip(drawn, numbers, strict=True)
        ]
        avoid = [DIVERSITIES[self.config.diversity](j.failed, b.row, k, n) if round_ else None for j, b, k, n in drawn]
        penalty = (lambda c, prefix: avoid[c](prefix) if avoid[c] else {}) if any(avoid) else None
        with self.clock("generate"):
            rows, last = [beam.row for _, beam, _, _ in drawn], at + length == self.config.max_new_tokens
            block = self.engine.sample_block(rows, keys, penalty, last)
        new = [(job, self.extend(beam, block, c)) for c, (job, beam, _, _) in enumerate(drawn)]
        self.score(new)
        for job in jobs:
            mine = [c for c, (owner, _) in enumerate(new) if owner is job]
            job.pool += [new[c][1] for c in mine]
            self.note(job, number, round_, [new[c][1] for c in mine], block, mine)
            for c in mine:
                job.failed.add(drawn[c][1].row, block.tokens[c], block.log_p[c])

    def extend(self, beam: Beam, block: Block, c: int) -> Beam:
        """Return the beam with candidate `c` of a block appended."""
        tokens = beam.tokens + block.tokens[c]
        finished = block.ended[c] or len(tokens) == self.config.max_new_tokens
        return Beam(tokens, self.policy.text(tokens), finished, beam.state, [*beam.ends, len(tokens)], block.first + c)

    def score(self, new: list[tuple[_Job, Beam]]) -> None:
        """Charge the cost of new candidates, ask the critic, then ask the reward of those that the rank still needs it for."""
        known = [(job, beam) for job, beam in new if beam.finished or not self.rank.blind]
        if self.rank.cost:
            for (_, beam), cost in zip(known, self.ask("cost", known), strict=True):
                beam.broken = math.isnan(cost)
                beam.cost = math.inf if beam.broken else cost
            for _, beam in new:  # also where the cost is not known yet: `terminal` charges nothing before the end, but z moves on
                beam.state = charge(
                    beam.state, beam.cost, self.config.accounting, self.config.gamma_safety,
                    len(beam.tokens) - 1, beam.finished,
                )  # fmt: skip
        if self.critic is not None:
            self.judge([beam for _, beam in new if not beam.finished and beam.safe(self.config)])
        lazy = self.rank.safety_first
        wanted = [(j, b) for j, b in known if not lazy or b.passes(self.config)] if self.rank.reward else []
        for (_, beam), reward in zip(wanted, self.ask("reward", wanted), strict=True):
            beam.broken |= math.isnan(reward)
            beam.reward = -math.inf if math.isnan(reward) else reward

    def judge(self, beams: list[Beam]) -> None:
        """Ask the critic about candidates of one length, from what the engine holds of them."""
        if not beams:
            return
        with self.clock("critic"):
            history = self.engine.history([beam.row for beam in beams], self.critic.reads_keys)
            f1, f2 = (x.tolist() for x in self.critic.judge(history, [beam.state.z for beam in beams]))
        for beam, *judgement in zip(beams, f1, f2, strict=True):
            beam.judged(*judgement, self.config)

    def ask(self, role: str, new: list[tuple[_Job, Beam]]) -> list[float]:
        """Score candidates by the cost or the reward model, and count it."""
        for job, beam in new:
            if not job.failure:
                job.counts.scorer_calls += 1
                job.counts.scorer_tokens += len(beam.tokens)
        texts = [(job.prompt.text, beam.text, beam.finished) for job, beam in new]
        with self.clock(role):
            return self.scorers[role].score(*zip(*texts, strict=True)).tolist() if texts else []

    def note(self, job: _Job, number: int, round_: int, beams: list[Beam], block: Block, mine: list[int]) -> None:
        """Count the work of a round and what it found."""
        if job.failure:
            return
        log_p = [x for c in mine for x in block.log_p[c]]
        log_q = [x for c in mine for x in block.log_q[c]]
        finals = [beam for beam in beams if beam.finished]
        job.counts.samples_drawn += len(mine)
        job.counts.policy_tokens += len(log_p)
        job.counts.rounds_used += 1
        job.counts.near_ties += sum(block.near_ties[c] for c in mine)
        job.trace.append(
            {
                "block": number,
                "round": round_,
                "drawn": len(mine),
                "safe": sum(b.passes(self.config) for b in beams) if self.rank.cost else None,
                "finals": len(finals),
                "safe_finals": sum(b.safe(self.config) for b in finals) if self.rank.cost else None,
                "kl": (sum(log_q) - sum(log_p)) / len(mine),
                "perplexity": math.exp(-sum(log_p) / len(log_p)),
            }
        )

    def eligible(self, job: _Job) -> list[Beam]:
        """Return the candidates that may be kept: under a safety-first rank those that are safe, if there are any, else all.

        What the critic alone rejects is ranked last, and fills the places that what it lets through leaves free.
        """
        safe = [beam for beam in job.pool if beam.safe(self.config)] if self.rank.safety_first else []
        return safe or job.pool

    def best_first(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: self.rank.key(beam, self.config))

    def keep(self, job: _Job) -> None:
        """Keep the best beams of the pool; with no safe one in an absorbing accounting a gated search has failed."""
        chosen = self.best_first(self.eligible(job))[: self.config.keep]
        if self.gated and self.config.accounting not in SIGNED and not chosen[0].safe(self.config):
            self.fail(job, self.why(job.pool))
        job.beams = chosen

    def why(self, pool: Sequence[Beam]) -> str:
        return "scorer_error" if any(beam.broken for beam in pool) else "exhausted"

    def fail(self, job: _Job, reason: str) -> None:
        """Mark a search as failed, once; what is found later never counts as an answer."""
        if not job.failure:
            job.failure, job.certified = reason, self.best_first(job.beams)[0]
            job.stopped = not self.config.probe_fail_open

    def responses(self) -> list[Response]:
        """Emit through the gate, measure all on one yardstick and report."""
        best = [self.best_first(job.beams)[0] for job in self.jobs]
        prompts = [job.prompt for job in self.jobs]
        with self.clock("cost"):
            wanted = [self.wanted(job, beam) for job, beam in zip(self.jobs, best, strict=True)]
            emissions = emit(self.raw_cost, prompts, wanted, self.config, self.gated)
            for job, emission in zip(self.jobs, emissions, strict=True):
                if self.gated:  # to a baseline the gate only adds a mark
                    job.counts.scorer_calls += emission.gate_calls
                    job.counts.scorer_tokens += emission.gate_tokens
        measured = measure(emissions, prompts, **self.scorers, config=self.config)
        share = {f"{part}_s": s / len(self.jobs) for part, s in self.seconds.items()}
        return [
            Response(
                prompt_id=job.prompt.id,
                prompt=job.prompt.text,
                set_name=job.prompt.set_name,
                text=e.text,
                status=e.status,
                reason=e.reason,
                finished=e.finished,
                n_tokens=e.n_tokens,
                reward=m.reward,
                cost=m.cost,
                peak_cost=m.peak_cost,
                fail_open_cost=self.fail_open_cost(job, beam, e),
                z_trace=m.z_trace,
                block_ends=e.ends,
                grid_ends=e.grid,
                counts=job.counts,
                trace=job.trace,
                tokens=e.tokens,
                **share,
            )
            for job, beam, e, m in zip(self.jobs, best, emissions, measured, strict=True)
        ]

    def wanted(self, job: _Job, best: Beam) -> Emission:
        """Return what the search would emit, before the gate."""
        if self.gated and not job.failure and not best.safe(self.config):
            self.fail(job, "dead_end" if self.config.accounting in SIGNED else self.why([best]))
        if not job.failure:
            # a method without a gate is judged by its final cost alone; in paper mode the path counts too
            safe = best.safe(self.config) or not self.method.gated
            otherwise = ("final_check" if safe else self.why(job.pool)) if self.method.gated else "over_budget"
            return self.emission(best, safe=safe, otherwise=otherwise)
        if self.config.on_failure == "truncate" and job.certified.tokens:
            safe = job.certified.safe(self.config)  # under signed accounting the failure may only show at the end
            return self.emission(job.certified, reason="truncated", otherwise=job.failure, finished=False, safe=safe)
        return Emission(None, reason=job.failure)

    def emission(self, beam: Beam, **more) -> Emission:
        """Return a beam as a text to emit, with the character offsets of its block ends."""
        n = len(beam.tokens)
        grid = [*range(self.grid, n, self.grid), n]
        ends, grid = ([len(self.policy.text(beam.tokens[:k])) for k in counts] for counts in (beam.ends, grid))
        fields = {"text": beam.text, "status": "verified_safe", "finished": beam.finished, "n_tokens": n, "tokens": beam.tokens}
        return Emission(ends=ends, grid=grid, **(fields | more))

    def fail_open_cost(self, job: _Job, best: Beam, emission: Emission) -> float | None:
        """Return the cost of what would have been emitted without a gate; None when the search stopped before that."""
        if emission.status != "abstained" and emission.reason != "truncated":
            return emission.cost
        if job.stopped:
            return None
        return float(self.scorers["cost"].score([job.prompt.text], [best.text], [True])[0])
