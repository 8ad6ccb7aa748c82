"""A pool of samples and scores on disk: what one search has drawn, no other draws again.

A token depends on its sequence and its key, and a score on its text, but neither on the method. So
searches of all methods, budgets and multipliers share them, also from several processes at a time.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import os
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from ..errors import ParameterError
from ..files import writing
from ..policy import Policy
from ..scorers import FunctionScorer, Scorer
from ..scoring import Text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# `check` is a hash of the rest: a record that a crash or a disk has damaged is drawn again
TOKEN = np.dtype(
    [
        ("key", "<u8"),
        ("token", "<i8"),
        ("log_p", "<f4"),
        ("log_q", "<f4"),
        ("near", "<u4"),
        ("check", "<u4"),
    ]
)
SCORE = np.dtype([("key", "<u8"), ("score", "<f8"), ("check", "<u8")])
GIB = 2**30
OPEN_FILES = 256
PACKAGE = Path(__file__).parent.parent


class Pool:
    """Samples and scores in a folder, for any number of searches and processes.

    Answers are the same with a pool and without one, whoever wrote it, while a batch moves logits
    by less than `igcore.engine.sampling.NEAR_TIE`. In half precision it moves them by more, and
    the first writer's batch decides.

    Parameters
    ----------
    folder : str or path
        Made when it is missing; delete it to start anew. It may be on any disk whose file system
        has POSIX locks, by which searches wait for a place alone; Windows has none, so there they
        wait for all places after a prompt.
    limit_gb : float
        Size in GiB from which nothing more is kept.

    Raises
    ------
    RunError
        When files cannot be written or locked, then and later.

    Attributes
    ----------
    drawn, reused : int
        Tokens that searches have sampled, and tokens that they found here.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_gb: float = 20.0):
        self.folder, self.limit_gb = Path(folder), limit_gb
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.bytes = sum(path.stat().st_size for path in self.folder.rglob("*.*") if path.is_file())
        self.drawn = self.reused = 0
        self._tables: OrderedDict[Path, Table] = OrderedDict()  # those used last stay open
        # and those that a search holds, of which there must be no second one
        self._open: weakref.WeakValueDictionary[Path, Table] = weakref.WeakValueDictionary()

    @property
    def full(self) -> bool:
        """Whether it has reached its limit."""
        return self.bytes >= self.limit_gb * GIB

    def tokens(self, prompt: bytes) -> "Table":
        """Return the sampled tokens of a prompt, which a digest names."""
        return self._table(self.folder / "tokens" / f"{prompt.hex()}.tokens", TOKEN)

    def scores(self, prompt: str) -> "Table":
        """Return the scores of the answers to a prompt."""
        return self._table(self.folder / "scores" / f"{digest(prompt).hex()}.scores", SCORE)

    def scores_of(self, scorer: Scorer, part: str = "") -> "PooledScores | None":
        """Return the scores of a scorer; None for one that does not tell what it is."""
        known = scorer_digest(scorer)
        return PooledScores(self, digest(known, part)) if known else None

    def _table(self, path: Path, record: np.dtype[Any]) -> "Table":
        """Return a table, read up to date."""
        self._open[path] = table = self._open.get(path) or Table(self, path, record)
        self._tables[path] = table
        self._tables.move_to_end(path)
        while len(self._tables) > OPEN_FILES:
            self._tables.popitem(last=False)  # closed when no search holds it
        table.refresh()
        return table


class Table:
    """An append-only file of records of one size, and what it holds by key.

    Many processes may append to it. The first record of a key counts, so all read the same.
    """

    def __init__(self, pool: Pool, path: Path, record: np.dtype[Any]):
        self.pool, self.path, self.record = pool, path, record
        self.known: dict[int, tuple[Any, ...]] = {}
        self._read = 0  # bytes
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
            # opened once: closing a second handle of a file would end this process's locks on it
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._file = os.open(path, flags, 0o666)
            self._whole = FileLock(f"{path}.lock", thread_local=False, poll_interval=0.005)
        weakref.finalize(self, os.close, self._file)

    def refresh(self) -> None:
        """Read what has been appended since."""
        size = os.fstat(self._file).st_size
        whole = (size - self._read) // self.record.itemsize * self.record.itemsize
        if whole <= 0:
            return
        os.lseek(self._file, self._read, os.SEEK_SET)
        found = np.frombuffer(os.read(self._file, whole), self.record)
        self._read += whole
        for key, *values, _ in found[found["check"] == _checks(found)].tolist():
            self.known.setdefault(key, tuple(values))

    def add(self, records: Sequence[tuple[Any, ...]]) -> None:
        """Append records without their check; a full pool keeps none."""
        new = np.array([(*record, 0) for record in records], self.record)
        new["check"] = _checks(new)
        for key, *values, _ in new.tolist():
            self.known.setdefault(key, tuple(values))
        if self.pool.full:
            warnings.warn(
                f"the pool {self.pool.folder} holds {self.pool.bytes / GIB:.1f} GiB, its limit; "
                "new samples and scores are not kept, and answers stay the same; raise limit_gb, "
                "or delete the folder",
                stacklevel=2,
            )
            return
        with self._locked(0), writing(self.pool.folder):
            size = os.fstat(self._file).st_size
            os.ftruncate(self._file, size - size % self.record.itemsize)  # a crash
            os.write(self._file, new.tobytes())
        self.pool.bytes += new.nbytes

    @contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        """Hold the lock of one byte of the file; it ends with the process."""
        if fcntl is None:
            with self._whole:
                yield
            return
        with writing(self.pool.folder):  # not every file system has locks
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def claim(self, place: bytes) -> Any:
        """Return a context in which no other process samples from a place."""
        return self._locked(1 + int.from_bytes(place[:7], "little"))


def _checks(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return a hash of every record but its check (n,)."""
    words = records.view("<u4").reshape(len(records), -1).astype(np.uint64)
    words = words[:, : -(records.dtype["check"].itemsize // 4)]
    factors = np.arange(3, 3 + 2 * words.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B1)
    sums: npt.NDArray[np.uint64] = ((words + 1) * factors).sum(1) >> 13
    return sums.astype("<u4")


# --- keys -----------------------------------------------------------------------------------------


def digest(*parts: str | bytes) -> bytes:
    """Return 16 bytes that name some parts."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)  # no two lists look the same
    return hashed.digest()


def number(*parts: str | bytes) -> int:
    """Return the key of a record: the first 64 bits of a digest."""
    return int.from_bytes(digest(*parts)[:8], "little")


@functools.cache
def code_digest(folder: Path) -> bytes:
    """Return a digest of the modules of a folder, and of the libraries that decide a number."""
    code = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    return digest(*code, *versions)


def policy_digest(policy: Policy) -> bytes:
    """Return a digest of all but prompt, tokens, key and penalty that decides a sample.

    Raises
    ------
    ParameterError
        For a policy without a digest: nobody could tell it from another.
    """
    if not policy.digest:
        raise ParameterError(
            f"policy {policy.name!r} has no digest, so its samples cannot be kept in a pool; load "
            "it with igcore.load_policy, or leave out the pool"
        )
    model = policy.model
    path = f"{model.dtype} {model.device.type} {policy.cache} {sorted(policy.eos_ids)}"
    # the engines: of a local model, and of one in a server
    code = [code_digest(PACKAGE / room) for room in ("engine", "serve")]
    return digest(*code, policy.digest, path)


def scorer_digest(scorer: Scorer) -> bytes | None:
    """Return a digest of a scorer with its code; None for one that does not tell what it is."""
    # the digest of a function does not cover what the function calls
    if isinstance(scorer, FunctionScorer) or not scorer.digest:
        return None
    module = sys.modules[type(scorer).__module__]
    try:
        code: str | bytes = inspect.getsource(module)
    except (OSError, TypeError):  # typed at a prompt
        return None
    if module.__name__.startswith("igcore."):  # it calls its neighbours
        code = code_digest(Path(str(module.__file__)).parent)
    return digest(scorer.name, scorer.digest, code)


class PooledScores:
    """The scores of one scorer in a pool; texts that it has failed on are not kept."""

    def __init__(self, pool: Pool, name: bytes):
        self.pool, self.name = pool, name

    def get(self, texts: Sequence[Text]) -> dict[Text, float]:
        """Return the scores that are known."""
        tables = {prompt: self.pool.scores(prompt).known for prompt in {text[0] for text in texts}}
        found = {text: tables[text[0]].get(self._key(text)) for text in texts}
        return {text: score[0] for text, score in found.items() if score}

    def add(self, scores: dict[Text, float]) -> None:
        """Keep the scores that are finite."""
        for prompt in {text[0] for text in scores}:
            own = {text: x for text, x in scores.items() if text[0] == prompt and np.isfinite(x)}
            if own:
                self.pool.scores(prompt).add([(self._key(text), x) for text, x in own.items()])

    def _key(self, text: Text) -> int:
        return number(self.name, text[1], str(text[2]))
