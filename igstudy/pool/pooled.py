"""An engine that looks in a pool before it samples, and reads a sequence only when it must.

It gives the same blocks as `igcore.engine.local.LocalEngine`, but proposes no tokens. While the
pool knows every token of a search, no model runs at all. Where it lacks one, the model reads the
sequences that lack something, in one pass, and samples what is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from sqlite3 import Connection
from typing import Any

from igcore.engine.block import Block, Keys, Penalties
from igcore.engine.diversity import Penalty
from igcore.engine.kv_cache import History
from igcore.engine.local import Engine, LocalEngine
from igcore.engine.sampling import AS_IS, Sampling
from igcore.policy import Policy

from . import Pool, digest, policy_digest, value_of

Make = Callable[[], Engine]
Draw = Sequence[Any]  # token, log_p, log_q, and whether it was a near tie
# a row, and the keys and penalty of its block
BlockRequest = tuple[int, Sequence[int], Penalty | None]


@dataclass(frozen=True)
class Branch:
    """A prompt and the tokens after it.

    Attributes
    ----------
    place : bytes
        Digest of all that decides the next token, but its key and its penalty.
    root : bytes
        That of the prompt alone, which names its database.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    place: bytes
    root: bytes

    def after(self, tokens: Sequence[int]) -> "Branch":
        """Return the branch with more tokens."""
        place = reduce(_after, tokens, self.place)
        return Branch(self.prompt, (*self.tokens, *tokens), place, self.root)


class PooledEngine:
    """Samples the blocks that a pool lacks, and adds them to it.

    Parameters
    ----------
    make : callable
        Makes the engine of the policy, a `LocalEngine`, when it is first needed.
    policy : Policy
    pool : Pool
    sampling : Sampling
        That of the engine.
    """

    def __init__(self, make: Make, policy: Policy, pool: Pool, sampling: Sampling = AS_IS):
        self.make, self.eos_ids, self.pool = make, policy.eos_ids, pool
        self.policy = policy_digest(policy)
        if sampling != AS_IS:
            self.policy = digest(self.policy, str(sampling))
        self._engine: LocalEngine | None = None
        self._begin([], {})

    def _begin(self, rows: Sequence[Branch], there: Mapping[int, int]) -> None:
        """Begin a block from these rows; the engine has the rows in `there`."""
        self.rows = rows
        self._there = there  # row that the engine has -> its number there
        self._candidates: dict[int, tuple[int, list[int]]] = {}  # live: its row and its tokens
        self._drawn = 0  # number of candidates of all rounds so far
        self._read: dict[int, int] = {}  # live candidate that the engine has -> its number there

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with prompts, one row each; nothing is read yet."""
        roots = [digest(self.policy, str(list(prompt))) for prompt in prompts]
        pairs = zip(prompts, roots, strict=True)
        self._begin([Branch(tuple(prompt), (), root, root) for prompt, root in pairs], {})

    # --- sampling ---------------------------------------------------------------------------------

    def sample_block(
        self, rows: Sequence[int], keys: Keys, penalties: Penalties = None, last: bool = False
    ) -> Block:
        """Sample one continuation of each given row, see `Engine.sample_block`."""
        penalties = penalties or [None] * len(rows)
        asked = list(zip(rows, keys, penalties, strict=True))
        found = self._known(asked)
        self.pool.reused += sum(map(len, found))
        if missing := [c for c, samples in enumerate(found) if not self._whole(samples, keys[c])]:
            self._sample(missing, asked, last, found)

        block = Block.empty(0, len(rows))
        for c, samples in enumerate(found):
            for sample in samples:
                block.append(c, *sample)
            block.ended[c] = block.tokens[c][-1] in self.eos_ids
            # as many as a search alone would read: neither an end token nor the last of a response
            unread = block.ended[c] or (last and len(samples) == len(keys[0]))
            block.encoded[c] = len(samples) - unread
            if not block.ended[c]:
                self._candidates[self._drawn + c] = rows[c], block.tokens[c]
        block.first = self._drawn
        self._drawn += len(rows)
        return block

    def _known(self, asked: Sequence[BlockRequest]) -> list[list[Draw]]:
        """Return the samples of each continuation that the pool has, up to the first it lacks."""
        found: list[list[Draw]] = [[] for _ in asked]
        for root in {self.rows[row].root for row, *_ in asked}:
            with self.pool.opened(root) as database:
                for samples, (row, keys, penalty) in zip(found, asked, strict=True):
                    if self.rows[row].root == root:
                        samples += self._known_after(database, self.rows[row].place, keys, penalty)
        return found

    def _known_after(
        self, database: Connection, place: bytes, keys: Sequence[int], penalty: Penalty | None
    ) -> list[Draw]:
        """Return the samples after a place, up to the first that the database lacks."""
        samples: list[Draw] = []
        while not self._whole(samples, keys):
            sample = value_of(database, _record(place, keys[len(samples)], penalty))
            if sample is None:
                break
            samples.append(sample)
            place = _after(place, sample[0])
        return samples

    def _whole(self, samples: Sequence[Draw], keys: Sequence[int]) -> bool:
        """True if a block of these keys needs no further token."""
        return len(samples) == len(keys) or (len(samples) > 0 and samples[-1][0] in self.eos_ids)

    def _sample(
        self,
        missing: Sequence[int],
        asked: Sequence[BlockRequest],
        last: bool,
        found: list[list[Draw]],
    ) -> None:
        """Sample what is missing of some candidates; add it to what was found, and to the pool."""
        rows, keys, penalties = zip(*(asked[c] for c in missing), strict=True)
        engine, own = self._at_rows(rows)
        heads = [[token for token, *_ in found[c]] for c in missing]
        block = engine.sample_block(own, keys, penalties, last, known=heads)
        new: list[tuple[bytes, bytes, Draw]] = []
        for i, c in enumerate(missing):
            branch = self.rows[rows[i]]
            place = branch.after(heads[i]).place
            whole = zip(block.tokens[i], block.log_p[i], block.log_q[i], block.near[i], strict=True)
            for key, sample in list(zip(keys[i], whole, strict=False))[len(heads[i]) :]:
                found[c].append(sample)
                new.append((branch.root, _record(place, key, penalties[i]), sample))
                place = _after(place, sample[0])
            if not (block.ended[i] or last):
                self._read[self._drawn + c] = block.first + i
        self.pool.add(new)
        self.pool.drawn += len(new)

    # --- what is kept -----------------------------------------------------------------------------

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, see `Engine.rollback`."""
        self._candidates = {c: self._candidates[c] for c in keep}
        self._read = {c: self._read[c] for c in keep if c in self._read}
        if self._engine:
            self._engine.rollback(list(self._read.values()))

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates the rows, see `Engine.select`.

        What the model has read, it reads on; the rest when a later block lacks something.
        """
        chosen = [self._candidates[c] for c in candidates]
        read = [i for i, c in enumerate(candidates) if c in self._read]
        if self._engine:
            self._engine.select([self._read[candidates[i]] for i in read])
        rows = [self.rows[row].after(tokens) for row, tokens in chosen]
        self._begin(rows, {i: number for number, i in enumerate(read)})

    def go_on(self, *_: Any, **__: Any) -> Block:
        """Raise ``NotImplementedError``: a method that steps back samples without a pool."""
        raise NotImplementedError

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return o_t and h_t of live candidates, see `Engine.history`."""
        engine, own = self._at_rows([self._candidates[c][0] for c in candidates])
        # the model reads what the pool has known
        if unread := [i for i, c in enumerate(candidates) if c not in self._read]:
            tokens = [self._candidates[candidates[i]][1] for i in unread]
            first = _feed(engine, [own[i] for i in unread], tokens)
            self._read |= {candidates[i]: first + number for number, i in enumerate(unread)}
        return engine.history([self._read[c] for c in candidates], keys)

    # --- reading ----------------------------------------------------------------------------------

    def _at_rows(self, rows: Sequence[int]) -> tuple[LocalEngine, list[int]]:
        """Return the engine, and the number there of each row.

        Where it lacks one, it reads these rows from their prompts. Rows that the pool knows to
        their ends are never read, unless something asks for latents.
        """
        engine, needed = self._engine or self.make(), sorted(set(rows))
        assert isinstance(engine, LocalEngine)  # not that of a server, see `Pool.engine`
        self._engine = engine
        if not self._there.keys() >= set(needed):
            branches = [self.rows[row] for row in needed]
            prompts = list(dict.fromkeys(branch.prompt for branch in branches))
            engine.open(prompts)
            own = [prompts.index(branch.prompt) for branch in branches]
            if branches[0].tokens:  # rows of one block have one length
                _feed(engine, own, [branch.tokens for branch in branches])
                own = list(range(len(branches)))
                engine.select(own)
            self._there, self._read = dict(zip(needed, own, strict=True)), {}
        return engine, [self._there[row] for row in rows]


def _feed(engine: LocalEngine, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> int:
    """Let the model read tokens after its rows; return the number of the first candidate."""
    unused = [[0] * len(tokens[0])] * len(rows)
    return engine.sample_block(rows, unused, known=tokens).first


def _after(place: bytes, token: int) -> bytes:
    """Return the place after one more token."""
    return digest(place, str(token))


def _record(place: bytes, key: int, penalty: Penalty | None) -> bytes:
    """Return the key of a sample in the pool."""
    return digest(place, str(key), penalty.digest if penalty else "")
