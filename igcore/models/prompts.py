"""Prompt sets by name or file, and their splits by hash of the text."""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import numpy as np

from ..errors import ParameterError, unknown_name
from ..files import root
from ..policy import Prompt, as_prompt
from ..scorers import Scorer
from ..scoring import checked_score
from ..settings import Count, Named, Natural, one_of, settings
from . import assets
from .promptsets import READERS, SOURCES, PromptOptions, ending_of, file_texts, hub_texts, read_text


def _rtp() -> list[str]:
    """Return the openings of RealToxicityPrompts, topic by topic."""
    folder, _ = assets.sound("rtp")
    topics = sorted(folder.glob("rtp_*.txt"))
    return [line for file in topics for line in file.read_text(encoding="utf-8").split("\n")]


def _shipped(name: str) -> list[str]:
    """Return the prompts of a file of this package, one a line."""
    return (files(__package__) / f"data/{name}.txt").read_text(encoding="utf-8").splitlines()


PROMPT_SETS: dict[str, Callable[[], list[str]]] = {
    "rtp": _rtp,
    # 24 harmless openings for teaching
    "mild": partial(_shipped, "mild"),
    # 80 everyday instructions and questions, of which the last 20 only sound dangerous
    "benign": partial(_shipped, "benign"),
}

# upper edge of each split's share: critics learn from `train`, settings are chosen on `tune`,
# `calibrate` is left for thresholds of your own, and what is reported comes from `test`
SPLITS = {"train": 0.50, "tune": 0.58, "calibrate": 0.74, "test": 1.0}

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

log = logging.getLogger("igcore")


@settings
class Choice:
    """Which prompts of a set are taken, see `load_prompts`."""

    split: Annotated[str, one_of(("all", *SPLITS))]
    limit: Count | None
    hardest: Natural

    def __post_init__(self):
        if self.hardest > (self.limit or 0):
            raise ParameterError(f"hardest {self.hardest} must be at most limit {self.limit}")


def split_of(text: str) -> str:
    """Return a key of `SPLITS`: a fixed function of the text, whatever set or order it is in.

    The first 13 hex digits of the text's sha256, read as a fraction of one, are below its edge.
    """
    share = int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13
    return next(split for split, edge in SPLITS.items() if share < edge)


def load_prompts(
    name: str | Path | Mapping | Named,
    split: str = "all",
    limit: int | None = None,
    hardest: int = 0,
    cost: Scorer | None = None,
) -> list[Prompt]:
    """Load a prompt set, ordered by prompt id and without duplicates; log how many there are.

    A set of the hub that its owners divided keeps their division. Their test part is the split
    ``test``, whole, and also ``all``. Of the prompts in their train part that are not in the test
    part too, ``tune`` and ``calibrate`` have the shares of `split_of`, and ``train`` is the rest.
    So a critic learns from their train part and is evaluated on their test part. With an option
    ``part`` that part is the whole set, and it is divided like any other: by hash alone.

    Parameters
    ----------
    name : str, Path or mapping
        ``"rtp"`` (623 openings of real web text that tempt a model), ``"mild"`` (24 harmless
        openings for teaching), ``"benign"`` (80 everyday instructions that nobody should refuse),
        ``"pku-saferlhf"``, ``"hex-phi"`` or ``"hh-rlhf"`` (the paper's, from the hub), any
        ``owner/name`` on the hub, or a path to a .txt file (a prompt a line) or a .csv, .tsv,
        .json, .jsonl or .parquet file with a column ``prompt``, perhaps compressed (.gz). A
        mapping gives options beside its ``name``, see `igcore.models.promptsets.PromptOptions`.
    split : str
        ``"all"``, or one of the splits of `split_of`.
    limit : int, optional
        At most this many prompts, the first by id; by default all.
    hardest : int
        This many of the `limit` are instead the prompts whose own text has the highest cost.
    cost : Scorer, optional
        Ranks the hardest; higher is worse, and a score that is not finite counts as the worst.

    Raises
    ------
    ParameterError
        If the set, an option, the split or the file is unknown, if the file cannot be read, if a
        prompt is blank or no text, if there is none, or if `limit`, `hardest` and `cost` do not fit
        together.
    AssetError
        If ``"rtp"`` or a set of the hub is not in the cache and cannot be fetched, or is not what
        it should be.
    """
    Choice(split, limit, hardest)
    if hardest and cost is None:
        raise ParameterError(f"hardest {hardest} needs a cost to rank the prompts by")
    source, options = check_prompts(name)
    set_name, parts = _read(source, options)
    texts = set(_in_split(parts, split))
    if not texts:
        raise ParameterError(
            f"prompt set {source!r} has no prompts in split {split!r}; choose another split or set"
        )
    prompts = sorted((as_prompt(text, set_name) for text in texts), key=attrgetter("id"))
    if options.only is not None:
        prompts = _only(prompts, options.only)
    ordered = _hardest_first(prompts, hardest, cost) if hardest else prompts
    chosen = sorted(ordered[:limit], key=attrgetter("id"))
    counts = [f"{part} {len(rows)} rows, {len(set(rows))} unique" for part, rows in parts.items()]
    message = "prompt set %s: %s; split %s %d, chosen %d"
    log.info(message, source, "; ".join(counts), split, len(prompts), len(chosen))
    return chosen


def check_prompts(name: str | Path | Mapping | Named) -> tuple[str, PromptOptions]:
    """Return the set, a name or a path, and its options; reads no file.

    Raises
    ------
    ParameterError
        For an unknown set or option, or an option of the wrong type or value.
    """
    chosen = Named.of(name, "prompt set")
    source = chosen.name
    allowed = ["only"]
    if ending_of(Path(source)) in READERS:
        allowed += ["column"]
    elif source in SOURCES or HUB_NAME.fullmatch(source):
        allowed += ["column", "revision", "subset", "part"]
    elif source not in PROMPT_SETS:
        hint = f", owner/name on the hub, or a path to a {'/'.join(READERS)} file"
        raise unknown_name("prompt set", source, (*PROMPT_SETS, *SOURCES), hint)
    chosen.check_options("prompt set", allowed)
    return source, PromptOptions(**chosen.options)


def _in_split(parts: dict[str, list[str]], split: str) -> list[str]:
    """Return the texts of a split, in file order.

    `parts` holds the owners' train and test part, or one part alone.
    """
    if len(parts) == 1:
        (texts,) = parts.values()
        return [text for text in texts if split in ("all", split_of(text))]
    if split in ("all", "test"):
        return parts["test"]
    held_out = set(parts["test"])
    # the share of `test` is training data here, because the owners' test part takes its place
    shares = ("train", "test") if split == "train" else (split,)
    return [text for text in parts["train"] if text not in held_out and split_of(text) in shares]


def _only(prompts: list[Prompt], file: str) -> list[Prompt]:
    """Return the prompts whose ids stand in a text file, see `PromptOptions`."""
    path = root() / file
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as why:
        raise ParameterError(
            f"option only is {file!r}, and {path} cannot be read ({why}); give a text file with "
            "the id of a prompt in every line"
        ) from why
    ids = [line.partition("#")[0].strip() for line in lines]
    known = {"", *(prompt.id for prompt in prompts)}
    wrong = next((n for n, id_ in enumerate(ids, start=1) if id_ not in known), 0)
    if wrong or not any(ids):
        where = f"line {wrong} of {path}" if wrong else path  # not its text: it may be any file
        raise ParameterError(
            f"{where} holds no id of a prompt of this set and split; choose another split or file"
        )
    return [prompt for prompt in prompts if prompt.id in ids]


def _hardest_first(prompts: list[Prompt], count: int, cost: Scorer) -> list[Prompt]:
    """Return the prompts, first the `count` whose text has the highest cost; ties keep order."""
    texts = [prompt.text for prompt in prompts]
    scores = checked_score(cost, [""] * len(texts), texts, [True] * len(texts))
    costs = np.where(np.isfinite(scores), scores, np.inf)
    ranked = np.argsort(-costs, kind="stable")
    hardest = [prompts[i] for i in ranked[:count]]
    return hardest + [prompt for prompt in prompts if prompt not in hardest]


def _read(source: str, options: PromptOptions) -> tuple[str, dict[str, list[str]]]:
    """Return the set's name and the texts of its parts in file order."""
    if source in PROMPT_SETS:
        return source, {"all": PROMPT_SETS[source]()}
    if ending_of(Path(source)) not in READERS:
        return source, hub_texts(source, options)
    path = Path(os.path.expanduser(source))
    texts = file_texts(path, options.column)
    return path.name.removesuffix(".gz").removesuffix(ending_of(path)), {"all": texts}
