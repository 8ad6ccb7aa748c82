"""An engine that looks in a pool before it samples, and reads a sequence only when it must.

It has the methods of `igcore.engine.local.LocalEngine`, and gives the same blocks. While the pool
knows every token of a search, no model runs at all. Where it lacks one, the model reads the
sequences that lack something, in one pass, and samples what is missing.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ..engine.block import Block, Steering
from ..engine.diversity import Penalty
from ..engine.kv_cache import History
from ..engine.local import LocalEngine
from ..policy import Policy
from . import Pool, Records, digest, number, policy_digest

Sample = tuple[Any, ...]  # token, log_p, log_q, and whether it was a near tie
Asked = tuple[int, Sequence[int], Penalty | None]  # a row, and the keys and penalty of its block


@dataclass(frozen=True)
class Branch:
    """A prompt, by its number, and the tokens after it.

    Attributes
    ----------
    place : bytes
        Digest of all that decides the next token, but its key and its penalty.
    """

    prompt: int
    tokens: tuple[int, ...]
    place: bytes

    def after(self, tokens: Sequence[int]) -> "Branch":
        """Return the branch with more tokens."""
        place = reduce(_after, tokens, self.place)
        return Branch(self.prompt, (*self.tokens, *tokens), place)


def pooled_engine(make: Callable[[], LocalEngine], policy: Policy, pool: Pool) -> "PooledEngine":
    """Return the engine of a policy that looks in a pool first."""
    return PooledEngine(make, policy.eos_ids, pool, policy_digest(policy))


class PooledEngine:
    """Samples the blocks that a pool lacks, and adds them to it.

    Parameters
    ----------
    make : callable
        Makes the `LocalEngine`, when it is first needed.
    eos_ids : collection of int
        Tokens that end a sequence.
    pool : Pool
    policy : bytes
        See `igcore.pool.policy_digest`.

    Attributes
    ----------
    steering : callable or None
        As that of the engine. Steered blocks are not kept: no other search would sample the same.
    """

    def __init__(
        self, make: Callable[[], LocalEngine], eos_ids: Collection[int], pool: Pool, policy: bytes
    ):
        self.make, self.eos_ids, self.pool, self.policy = make, eos_ids, pool, policy
        self.steering: Steering | None = None
        self._engine: LocalEngine | None = None
        self._all = False  # whether every row is read at every block
        self._begin([])

    def _begin(self, rows: list[Branch]) -> None:
        """Begin a block from these rows."""
        self.rows = rows
        self._candidates: dict[int, tuple[int, list[int]]] = {}  # live: its row and its tokens
        self._drawn = 0  # number of candidates of all rounds so far
        self._read: dict[int, int] = {}  # live candidate that the engine has -> its number there

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with prompts, one row each; nothing is read yet."""
        self.prompts = prompts
        places = [digest(self.policy, str(list(prompt))) for prompt in prompts]
        self._tables = [self.pool.tokens(place) for place in places]
        self._roots = [Branch(i, (), place) for i, place in enumerate(places)]
        # the rows of the engine: some of ours, or what some of ours continue
        self._anchors: list[Branch] = []
        self._begin(self._roots)

    # --- sampling ---------------------------------------------------------------------------------

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalties: Sequence[Penalty | None] | None = None,
        last: bool = False,
    ) -> Block:
        """Sample one continuation of each given row, see `LocalEngine.sample_block`."""
        penalties = penalties or [None] * len(rows)
        if self.steering is not None:
            engine, own = self._at_rows(rows)
            engine.steering = self.steering
            block = engine.sample_block([own[row] for row in rows], keys, penalties, last)
            return self._numbered(rows, block, read=True)

        asked = list(zip(rows, keys, penalties, strict=True))
        found = self._known(asked)
        drawn = self.pool.drawn
        if missing := [c for c, samples in enumerate(found) if not self._whole(samples, keys[c])]:
            self._sample(missing, asked, last, found)
        self.pool.reused += sum(map(len, found)) - (self.pool.drawn - drawn)

        block = Block.empty(0, len(rows))
        for c, samples in enumerate(found):
            for sample in samples:
                block.append(c, *sample)
            block.ended[c] = block.tokens[c][-1] in self.eos_ids
            # as many as a search alone would read: neither an end token nor the last of a response
            unread = block.ended[c] or (last and len(samples) == len(keys[0]))
            block.encoded[c] = len(samples) - unread
        return self._numbered(rows, block)

    def _known(self, asked: Sequence[Asked]) -> list[list[Sample]]:
        """Return the samples of each continuation that the pool has, up to the first it lacks."""
        found: list[list[Sample]] = [[] for _ in asked]
        for prompt in {self.rows[row].prompt for row, *_ in asked}:
            with self._tables[prompt].opened() as records:
                for samples, (row, keys, penalty) in zip(found, asked, strict=True):
                    if self.rows[row].prompt == prompt:
                        samples += self._known_after(records, self.rows[row].place, keys, penalty)
        return found

    def _known_after(
        self, records: Records, place: bytes, keys: Sequence[int], penalty: Penalty | None
    ) -> Iterator[Sample]:
        """Yield the samples after a place, up to the first that these records lack."""
        for key in keys:
            sample = records.get(_record(place, key, penalty))
            if sample is None:
                return
            yield sample
            if sample[0] in self.eos_ids:
                return
            place = _after(place, sample[0])

    def _whole(self, samples: Sequence[Sample], keys: Sequence[int]) -> bool:
        """True if a block of these keys needs no further token."""
        return len(samples) == len(keys) or (len(samples) > 0 and samples[-1][0] in self.eos_ids)

    def _sample(
        self,
        missing: Sequence[int],
        asked: Sequence[Asked],
        last: bool,
        found: list[list[Sample]],
    ) -> None:
        """Sample what is missing of some candidates; add it to what was found, and to the pool."""
        rows, keys, penalties = zip(*(asked[c] for c in missing), strict=True)
        engine, own = self._at_rows(rows)
        heads = [[token for token, *_ in found[c]] for c in missing]
        block = engine.sample_block([own[row] for row in rows], keys, penalties, last, known=heads)
        new: dict[int, list[Any]] = {}  # records by prompt
        for i, c in enumerate(missing):
            branch = self.rows[rows[i]].after(heads[i])
            place, records = branch.place, new.setdefault(branch.prompt, [])
            whole = zip(block.tokens[i], block.log_p[i], block.log_q[i], block.near[i], strict=True)
            for key, sample in list(zip(keys[i], whole, strict=False))[len(heads[i]) :]:
                found[c].append(sample)
                records.append((_record(place, key, penalties[i]), *sample))
                place = _after(place, sample[0])
            if not (block.ended[i] or last):
                self._read[self._drawn + c] = block.first + i
        for prompt, records in new.items():
            with self._tables[prompt].opened() as table:
                table.add(records)
            self.pool.drawn += len(records)

    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each row, see `LocalEngine.propose`."""
        engine, own = self._at_rows(rows)
        block = engine.propose([own[row] for row in rows], k)
        return self._numbered([row for row in rows for _ in range(k)], block, read=True)

    def _numbered(self, rows: Sequence[int], block: Block, read: bool = False) -> Block:
        """Number the candidates of a block on, which the engine may have read."""
        for c, row in enumerate(rows):
            if not block.ended[c]:
                self._candidates[self._drawn + c] = row, block.tokens[c]
                if read:
                    self._read[self._drawn + c] = block.first + c
        block.first = self._drawn
        self._drawn += len(rows)
        return block

    # --- what is kept -----------------------------------------------------------------------------

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, see `LocalEngine.rollback`."""
        self._candidates = {c: self._candidates[c] for c in keep}
        self._read = {c: self._read[c] for c in keep if c in self._read}
        if self._engine:
            self._engine.rollback(list(self._read.values()))

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates the rows, see `LocalEngine.select`.

        What the model was sampling from, it reads on; the rest when a later block lacks something.
        """
        if unknown := set(candidates) - set(self._candidates):
            raise KeyError(
                f"candidates {sorted(unknown)} have no state; select live candidates of this block"
            )
        chosen = [self._candidates[c] for c in candidates]
        rows = [self.rows[row].after(tokens) for row, tokens in chosen]
        if any(c in self._read for c in candidates):
            here = [i for i, (row, _) in enumerate(chosen) if self.rows[row] in self._anchors]
            engine = self._catch_up([candidates[i] for i in here])
            engine.select([self._read[candidates[i]] for i in here])
            self._anchors = [rows[i] for i in here]
        elif self._engine:
            self._engine.rollback()
        self._begin(rows)

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return o_t and h_t of live candidates, see `LocalEngine.history`."""
        self._all = True  # and again after the next block
        engine = self._catch_up(candidates)
        return engine.history([self._read[c] for c in candidates], keys)

    # --- reading ----------------------------------------------------------------------------------

    def _catch_up(self, candidates: Sequence[int]) -> LocalEngine:
        """Let the model read the candidates that it has not."""
        engine, own = self._at_rows([self._candidates[c][0] for c in candidates])
        if unread := [c for c in candidates if c not in self._read]:
            rows, tokens = zip(*(self._candidates[c] for c in unread), strict=True)
            first = _read(engine, [own[row] for row in rows], tokens)
            self._read |= {c: first + i for i, c in enumerate(unread)}
        return engine

    def _at_rows(self, needed: Collection[int]) -> tuple[LocalEngine, dict[int, int]]:
        """Return the engine and the number of each needed row in it; it reads what it lacks.

        Rows that the pool knows to their ends are never read, unless something asks for latents.
        """
        if self._engine is None:
            self._engine = self.make()
        engine, needed = self._engine, range(len(self.rows)) if self._all else set(needed)
        own = self._anchored()
        if not own.keys() >= set(needed):  # left behind, or nothing was read yet: from the prompts
            prompts = sorted({self.rows[row].prompt for row in needed})
            engine.open([self.prompts[prompt] for prompt in prompts])
            self._anchors, self._read = [self._roots[prompt] for prompt in prompts], {}
            own = self._anchored()
        behind = len(self._anchors[0].tokens)  # rows of one block have one length
        if behind < len(self.rows[0].tokens):
            tokens = [self.rows[row].tokens[behind:] for row in own]
            first = _read(engine, list(own.values()), tokens)
            engine.select(range(first, first + len(own)))
            self._anchors = [self.rows[row] for row in own]
            own = {row: i for i, row in enumerate(own)}
        return engine, own

    def _anchored(self) -> dict[int, int]:
        """Return each row that an engine's row continues, and the number of that one."""
        found = {row: self._anchor(branch) for row, branch in enumerate(self.rows)}
        return {row: anchor for row, anchor in found.items() if anchor >= 0}

    def _anchor(self, row: Branch) -> int:
        """Return the number of the engine's row that a row continues, -1 where there is none."""
        for i, anchor in enumerate(self._anchors):
            begins = row.tokens[: len(anchor.tokens)] == anchor.tokens
            if anchor.prompt == row.prompt and begins:
                return i
        return -1


def _read(engine: LocalEngine, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> int:
    """Let the model read tokens after its rows; return the number of the first candidate."""
    unused = [[0] * len(tokens[0])] * len(rows)
    return engine.sample_block(rows, unused, known=tokens).first


def _after(place: bytes, token: int) -> bytes:
    """Return the place after one more token."""
    return digest(place, str(token))


def _record(place: bytes, key: int, penalty: Penalty | None) -> int:
    """Return the key of a sample in the pool."""
    return number(place, str(key), penalty.digest if penalty else "")
