"""One blockwise loop (the paper's Algorithm 1, made consistent): every method is a set of options
of it, see `igcore.beams`.

Knows candidates, their scores and their safety states; leaves tokens and keys/values to the engine
and text to the policy::

    B <- {prompt}
    repeat until every kept beam is finished:
        pool <- finished beams
        for each round:
            draw n_samples blocks, split evenly over the live beams of B;  score them;  add them to the pool
            stop when one of the pool is accepted: safe, and let through by the critic if there is one
            else note their tokens as failed
        B <- the best `keep` of the pool
    return the best of B, if it passes the gate
"""

import math
import time
from collections.abc import Sequence
from contextlib import contextmanager

from .beams import METHODS, RANKS, Beam
from .budget import charge, start
from .engine.diversity import DIVERSITIES, Failures
from .engine.engine import Block, Engine
from .engine.memory import CRITIC_ROWS
from .engine.sampling import gumbel, random_key
from .job import Job
from .scorers import Cached, afresh, open_sessions
from .verdict import Emission, Response, emit, measure


def split(beams: Sequence[Beam], n: int) -> list[tuple[Beam, int, int]]:
    """Split n samples evenly over beams: one (beam, index among its samples, number of these) per
    sample.
    """
    shares = [n // len(beams) + (i < n % len(beams)) for i in range(len(beams))]
    return [
        (beam, k, share) for beam, share in zip(beams, shares, strict=True) for k in range(share)
    ]


class Search:
    """The loop for one group of prompts."""

    def __init__(
        self, method, policy, prompts, ids, reward, cost, critic, config, settings, seed, on_block
    ):
        self.policy, self.ids, self.config, self.seed, self.on_block = (
            policy,
            ids,
            settings,
            seed,
            on_block,
        )
        self.grid = (
            config.block_size
        )  # on which every method is measured, whatever blocks it searches in
        self.method, self.rank = METHODS[method], RANKS[METHODS[method].rank]
        self.critic = critic if self.rank.critic else None
        self.seconds = {"generate": 0.0, "cost": 0.0, "reward": 0.0, "critic": 0.0}
        self.raw_cost, given = afresh(cost), {"cost": cost, "reward": reward}
        with self.clock("cost"):
            carried, self.sessions = open_sessions(given, [p.text for p in prompts])
        self.scorers = {
            role: Cached(scorer, settings.n_samples) for role, scorer in carried.items()
        }
        # what is reported can be read again by anybody, so nothing of it is carried
        self.yardstick = {
            role: self.scorers[role]
            if carried[role] is scorer
            else Cached(afresh(scorer), settings.n_samples)
            for role, scorer in given.items()
        }
        steering = critic.steering(policy.model, settings) if self.method.steered else None
        self.engine = Engine(
            policy.model,
            policy.eos_ids,
            policy.cache,
            self.critic.watch if self.critic else None,
            steering,
        )
        root, gated = start(config.budget), self.method.gated and config.on_failure != "paper"
        self.jobs = [
            Job(prompt, self.method, settings, gated, [Beam([], "", False, root, [], row)])
            for row, prompt in enumerate(prompts)
        ]

    @contextmanager
    def clock(self, part: str):
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def run(self) -> list[Response]:
        with self.clock("generate"):
            self.engine.open(self.ids)
        for job, ids in zip(self.jobs, self.ids, strict=True):
            job.counts.forward_tokens += len(ids)
            if job.gated and not job.best.safe(self.config):  # strict reading with budget 0
                job.fail("dead_end")
        block = 0
        while jobs := [job for job in self.jobs if job.live]:
            self.block(block, jobs)
            block += 1
        return self.responses()

    def block(self, number: int, jobs: list[Job]) -> None:
        """Extend every live job by one block and keep its best beams."""
        for job in jobs:
            job.pool = [beam for beam in job.beams if beam.finished]
            job.failed = Failures(self.policy.eos_ids, self.config.diversity_penalty)
        for round_ in range(self.config.rounds):
            asking = [job for job in jobs if round_ == 0 or not job.found]
            if not asking:
                break
            if round_:
                self.engine.rollback(
                    keep=[beam.row for job in jobs for beam in job.chosen() if not beam.finished]
                )
            self.round(number, round_, asking)
        for job in jobs:
            job.keep()
            if self.on_block and not job.failure:
                self.on_block(job.prompt, job.beams)
        survivors = [(job.prompt.text, beam) for job in self.jobs for beam in job.live]
        with self.clock("generate"):
            self.engine.select([beam.row for _, beam in survivors])
        if self.method.proposes:  # what was selected has been read only now
            for job in jobs:
                job.counts.forward_tokens += len(job.live)
        with self.clock("cost"):
            for session in self.sessions:
                session.retain(
                    [prompt for prompt, _ in survivors], [beam.text for _, beam in survivors]
                )
        for row, (_, beam) in enumerate(survivors):
            beam.row = row

    def round(self, number: int, round_: int, jobs: list[Job]) -> None:
        """Draw and score one round of candidates and add them to the pools of their jobs."""
        drawn = [
            (job, beam, k, n)
            for job in jobs
            for beam, k, n in split(job.live, self.config.n_samples)
        ]
        block = self.propose(jobs) if self.method.proposes else self.sample(round_, drawn)
        new = [(job, self.extend(job, beam, block, c)) for c, (job, beam, _, _) in enumerate(drawn)]
        self.score(new)
        for job in jobs:
            mine = [c for c, (owner, _) in enumerate(new) if owner is job]
            job.pool += [new[c][1] for c in mine]
            job.note(number, round_, [new[c][1] for c in mine], block, mine)
            for c in mine:
                job.failed.add(drawn[c][1].row, block.tokens[c], block.log_p[c])

    def sample(self, round_: int, drawn: list[tuple[Job, Beam, int, int]]) -> Block:
        """Draw a block from each (job, beam, index among the beam's samples, number of these)."""
        at = len(drawn[0][1].tokens)  # live beams have all the same length
        length = min(self.config.block_size, self.config.max_new_tokens - at)
        keys = [  # every job draws n_samples in a row
            [
                random_key(self.seed, job.prompt.id, round_, c % self.config.n_samples, at + t)
                for t in range(length)
            ]
            for c, (job, *_) in enumerate(drawn)
        ]
        avoid = [
            DIVERSITIES[self.config.diversity](j.failed, b.row, k, n) if round_ else None
            for j, b, k, n in drawn
        ]
        penalty = (lambda c, prefix: avoid[c](prefix) if avoid[c] else {}) if any(avoid) else None
        last = at + length == self.config.max_new_tokens
        with self.clock("generate"):
            return self.engine.sample_block(
                [beam.row for _, beam, _, _ in drawn], keys, penalty, last
            )

    def propose(self, jobs: list[Job]) -> Block:
        """Offer the most probable tokens of the one live beam of each job."""
        with self.clock("generate"):
            return self.engine.propose(
                [beam.row for job in jobs for beam in job.live], self.config.n_samples
            )

    def extend(self, job: Job, beam: Beam, block: Block, c: int) -> Beam:
        """Return the beam with candidate `c` of a block appended."""
        tokens = beam.tokens + block.tokens[c]
        finished = block.ended[c] or len(tokens) == self.config.max_new_tokens
        text, ends, log_p = self.policy.text(tokens), [*beam.ends, len(tokens)], sum(block.log_p[c])
        new = Beam(tokens, text, finished, beam.state, ends, block.first + c, log_p=log_p)
        if (
            self.method.proposes and self.config.token_temperature
        ):  # by token: how near ones are ordered must not matter
            new.noise = gumbel(
                random_key(self.seed, job.prompt.id, 0, tokens[-1], len(beam.tokens))
            )
        return new

    def score(self, new: list[tuple[Job, Beam]]) -> None:
        """Charge the cost of new candidates, ask the critic, then ask the reward of those that the
        rank still needs it for.
        """
        known = [(job, beam) for job, beam in new if beam.finished or not self.rank.blind]
        if self.rank.cost:
            for (_, beam), cost in zip(known, self.ask("cost", known), strict=True):
                beam.broken = math.isnan(cost)
                beam.cost = math.inf if beam.broken else cost
            for (
                _,
                beam,
                # also where the cost is not known yet: `terminal` charges nothing before the end,
                # but z
                # moves on
            ) in new:
                beam.state = charge(
                    beam.state,
                    beam.cost,
                    self.config.accounting,
                    self.config.gamma_safety,
                    len(beam.tokens) - 1,
                    beam.finished,
                )
        if self.critic is not None:
            self.judge([beam for _, beam in new if not beam.finished and beam.safe(self.config)])
        lazy = self.rank.safety_first
        wanted = (
            [(j, b) for j, b in known if not lazy or b.passes(self.config)]
            if self.rank.reward
            else []
        )
        for (_, beam), reward in zip(wanted, self.ask("reward", wanted), strict=True):
            beam.broken |= math.isnan(reward)
            beam.reward = -math.inf if math.isnan(reward) else reward

    def judge(self, beams: list[Beam]) -> None:
        """Ask the critic about candidates of one length, from what the engine holds of them."""
        size = (
            CRITIC_ROWS if self.critic.reads_keys else max(1, len(beams))
        )  # keys and values are large
        for at in range(0, len(beams), size):
            some = beams[at : at + size]
            with self.clock("critic"):
                history = self.engine.history([beam.row for beam in some], self.critic.reads_keys)
                f1, f2 = (
                    x.tolist() for x in self.critic.judge(history, [beam.state.z for beam in some])
                )
            for beam, *judgement in zip(some, f1, f2, strict=True):
                beam.judged(*judgement, self.config)

    def ask(self, role: str, new: list[tuple[Job, Beam]]) -> list[float]:
        """Score candidates by the cost or the reward model, and count it."""
        for job, beam in new:
            if not job.failure:
                job.counts.scorer_calls += 1
                job.counts.scorer_tokens += len(beam.tokens)
        texts = [(job.prompt.text, beam.text, beam.finished) for job, beam in new]
        with self.clock(role):
            return self.scorers[role].score(*zip(*texts, strict=True)).tolist() if texts else []

    def responses(self) -> list[Response]:
        """Emit through the gate, measure all on one yardstick and report."""
        prompts = [job.prompt for job in self.jobs]
        with self.clock("cost"):
            wanted = [job.emission(self.policy, self.grid) for job in self.jobs]
            gated, read_afresh = (
                self.jobs[0].gated,
                self.yardstick["cost"] is not self.scorers["cost"],
            )
            path = self.yardstick["cost"] if gated and read_afresh else None
            emissions = emit(self.raw_cost, prompts, wanted, self.config, gated, path)
            for job, emission in zip(self.jobs, emissions, strict=True):
                if job.gated:  # to a baseline the gate only adds a mark
                    job.counts.scorer_calls += emission.gate_calls
                    job.counts.scorer_tokens += emission.gate_tokens
        measured = measure(emissions, prompts, **self.yardstick, config=self.config)
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
                fail_open_cost=self.fail_open_cost(job, e),
                z_trace=m.z_trace,
                block_ends=e.ends,
                grid_ends=e.grid,
                counts=job.counts,
                trace=job.trace,
                finals=job.finals,
                tokens=e.tokens,
                **share,
            )
            for job, e, m in zip(self.jobs, emissions, measured, strict=True)
        ]

    def fail_open_cost(self, job: Job, emission: Emission) -> float | None:
        """Return the cost of what would have been emitted without a gate; None when the search
        stopped before that.
        """
        if emission.status != "abstained" and emission.reason != "truncated":
            return emission.cost
        if job.stopped:
            return None
        return float(self.scorers["cost"].score([job.prompt.text], [job.best.text], [True])[0])
