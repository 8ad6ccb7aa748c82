"""An on-disk cache of samples and scores shared between searches.

A token depends on its sequence and its key, and a score on its text, but neither on the method. So
searches of all methods, budgets and multipliers share them, also from several processes at a time.
"""

import hashlib
import json
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from igcore import ParameterError, Policy, RunError, Scorer
from igcore.engine.local import Engine
from igcore.engine.sampling import Sampling
from igcore.files import root, writing
from igcore.scorers import FunctionScorer
from igcore.scoring import TextKey

from ..provenance import versions
from ..sources import all_parts, has_source, module_digests, package_digest

WAIT = 600.0  # seconds for another process that is writing; it takes milliseconds
TABLE = "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, value TEXT) WITHOUT ROWID"


class Pool:
    """Samples and scores in a folder, for any number of searches and processes.

    Answers are the same with a pool and without one, whoever wrote it, while a batch moves logits
    by less than `igcore.engine.sampling.NEAR_TIE`. In half precision it moves them by more, and
    the first writer's batch decides.

    Parameters
    ----------
    folder : str or path
        Created if it is missing; delete it to start again. It holds an SQLite database for each
        prompt, and may be on any disk whose file system has POSIX locks.

    Raises
    ------
    RunError
        When files are damaged, or cannot be written or locked, then and later.

    Attributes
    ----------
    drawn, reused : int
        Tokens that searches have sampled, and tokens that they found here.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.drawn = self.reused = 0

    @contextmanager
    def opened(self, prompt: bytes) -> Iterator[sqlite3.Connection]:
        """Open the database of a prompt, which a digest names, for reading or adding."""
        path = self.folder / f"{prompt.hex()}.sqlite"
        try:
            # a journal, because write-ahead logs do not work on network file systems
            with closing(sqlite3.connect(path, WAIT, isolation_level=None)) as database:
                # what is committed outlives this process, and the disk need not be waited for
                database.execute("PRAGMA synchronous = OFF")
                database.execute(TABLE)
                database.execute("BEGIN")
                yield database
                database.execute("COMMIT")
        except sqlite3.Error as error:
            raise RunError(
                f"the pool cannot use {path} ({error}); free some space where the disk is full, or "
                "else delete this file: what it held is sampled again"
            ) from error

    def add(self, records: Iterable[tuple[bytes, bytes, Any]]) -> None:
        """Add JSON values, each after the digest of its prompt and its key.

        Any number of threads and processes may do so. The first value of a key counts.
        """
        by_prompt: dict[bytes, list[tuple[bytes, str]]] = defaultdict(list)
        for prompt, key, value in records:
            by_prompt[prompt].append((key, json.dumps(value)))
        for prompt, lines in by_prompt.items():  # one at a time: locks are held briefly
            with self.opened(prompt) as database:
                database.executemany("INSERT OR IGNORE INTO records VALUES (?, ?)", lines)

    def engine(self, make: Callable[[], Engine], policy: Policy, sampling: Sampling) -> Engine:
        """Return an engine that looks here first, and samples the rest with the one of `make`.

        A server has no pool: it draws some candidates of a group with another seed than all.
        """
        from .pooled import PooledEngine  # which needs this module

        served = hasattr(policy, "server")
        return make() if served else PooledEngine(make, policy, self, sampling)

    def scores_of(self, scorer: Scorer, part: str = "") -> "PooledScores | None":
        """Return the scores of a scorer; None for a scorer without a digest."""
        known = scorer_digest(scorer)
        return PooledScores(self, digest(known, part)) if known else None


def pool_at(folder: str | None) -> Pool | None:
    """Return the pool in a folder of the project; None for None."""
    return None if folder is None else Pool(root() / folder)


def value_of(database: sqlite3.Connection, key: bytes) -> Any:
    """Return the value of a key in the database of its prompt, or None."""
    found = database.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
    return found and json.loads(found[0])


# --- keys -----------------------------------------------------------------------------------------


def digest(*parts: str | bytes) -> bytes:
    """Return 16 bytes that name some parts."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)  # no two lists look the same
    return hashed.digest()


def code_digest(*modules: str) -> bytes:
    """Return a digest of the packages, of a user's modules, and of the versions of libraries."""
    own = package_digest("igcore"), package_digest("igserve"), package_digest("igstudy", "scorers")
    return digest(*own, str(module_digests(*modules)), str(versions()))


def policy_digest(policy: Policy) -> bytes:
    """Return a digest of all but prompt, tokens, key and penalty that decides a sample.

    Raises
    ------
    ParameterError
        For a policy without a digest: another one would find its samples.
    """
    if not policy.digest:
        raise ParameterError(
            f"policy {policy.name!r} has no digest, so its samples cannot be kept in a pool; load "
            "it with igcore.load_policy, or leave out the pool"
        )
    model = policy.model
    path = f"{model.dtype} {model.device.type} {policy.cache} {sorted(policy.eos_ids)}"
    return digest(code_digest(), policy.digest, path)


def scorer_digest(scorer: Scorer) -> bytes | None:
    """Return a digest of a scorer with its code; None for a function, or without a digest."""
    parts = list(all_parts(scorer))
    # the digest of a function does not cover what the function calls
    if any(isinstance(p, FunctionScorer) or not p.digest or not has_source(type(p)) for p in parts):
        return None
    modules = (type(part).__module__ for part in parts)
    return digest(scorer.name, scorer.digest, code_digest(*modules))


@dataclass(frozen=True)
class PooledScores:
    """The scores of one scorer in a pool; texts that it has failed on are not kept."""

    pool: Pool
    name: bytes

    def get(self, texts: Sequence[TextKey]) -> dict[TextKey, float]:
        """Return the scores that are known."""
        found = {}
        for prompt in {text[0] for text in texts}:
            with self.pool.opened(digest(prompt)) as database:
                for text in texts:
                    if text[0] == prompt:
                        found[text] = value_of(database, self._key(text))
        return {text: score for text, score in found.items() if score is not None}

    def add(self, scores: Mapping[TextKey, float]) -> None:
        """Keep the scores that are finite."""
        finite = [text for text, score in scores.items() if math.isfinite(score)]
        self.pool.add((digest(text[0]), self._key(text), scores[text]) for text in finite)

    def _key(self, text: TextKey) -> bytes:
        return digest(self.name, text[1], str(text[2]))
