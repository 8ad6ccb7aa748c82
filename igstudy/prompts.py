"""The prompt sets of the paper and of the runs by name, and which prompts of a set a run takes.

Importing igstudy adds them to `igcore.catalog.PROMPT_SETS`.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from igcore.catalog import PROMPT_SETS
from igcore.errors import AssetError, ParameterError, needs, one_line, unknown_name
from igcore.models import prompts as reading
from igcore.models.hub import snapshot
from igcore.prompt import Chat, Prompt, as_prompt
from igcore.scorers import Scorer
from igcore.scoring import checked_score
from igcore.settings import Count, Named, Natural, one_of, settings

from .assets import sound
from .files import root

# upper edge of each split's share: critics learn from `train`, settings are chosen on `tune`,
# `calibrate` is left for thresholds of your own, and what is reported comes from `test`
SPLITS = {"train": 0.50, "tune": 0.58, "calibrate": 0.74, "test": 1.0}

HEX_PHI = "LLM-Tuning-Safety/HEx-PHI"
SOURCES = {
    "pku-saferlhf": "PKU-Alignment/PKU-SafeRLHF",
    "hex-phi": HEX_PHI,
    "hh-rlhf": "Dahoas/full-hh-rlhf",
}
# repo -> what its owners do not say of its files: without the second, which was withdrawn; lines
# without a header, in which an unquoted comma is part of the prompt
LAYOUTS: dict[str, dict[str, Any]] = {
    HEX_PHI: {
        "data_files": [f"category_{i}.csv" for i in (1, *range(3, 12))],
        "sep": "\x1f",
        "header": None,
        "names": ["prompt"],
        "keep_default_na": False,
    }
}


# set -> the set with the twin of each of its prompts in the same place; twins have the split and
# the place of that set's prompt, so that one split and one limit take whole pairs
TWINS = {"wsr-harmless": "wsr-harmful"}

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

log = logging.getLogger("igcore")


@settings
class PromptOptions:
    """Options of a prompt set, besides its name.

    Attributes
    ----------
    only : str, optional
        A text file with the ids of the prompts that are taken, one a line; # begins a comment. Seen
        from `igstudy.files.root`.
    column : str
        Of a file or a data set: the column that holds the prompts.
    revision, subset, part : str, optional
        Of a data set of the hub: see `igcore.models.hub.snapshot`; one of the configurations that
        its owners name; and one of the parts into which they divided it.
    system : str, optional
        A system message that the policy reads before each prompt, in its chat template. Scorers
        see the prompt alone, and its id stays.
    """

    only: str | None = None
    system: Annotated[str, Field(min_length=1)] | None = None
    column: str = "prompt"
    revision: str | None = None
    subset: str | None = None
    part: str | None = None


@settings
class Choice:
    """Which prompts of a set are taken, see `load_prompts`."""

    split: Annotated[str, one_of(("all", *SPLITS))]
    limit: Count | None
    hardest: Natural

    def __post_init__(self) -> None:
        if self.hardest > (self.limit or 0):
            raise ParameterError(f"hardest {self.hardest} must be at most limit {self.limit}")


def split_of(text: str) -> str:
    """Return a key of `SPLITS`: a fixed function of the text alone.

    The first 13 hex digits of the text's sha256, read as a fraction of one, are below its edge.
    """
    share = int(hashlib.sha256(text.encode()).hexdigest()[:13], 16) / 16**13
    return next(split for split, edge in SPLITS.items() if share < edge)


def load_prompts(
    name: str | Path | Mapping[str, Any] | Named,
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
        ``"rtp"`` (623 openings of real web text that tempt a model), ``"strongreject"`` (313
        harmful requests), ``"wsr-harmful"`` and ``"wsr-harmless"`` (60 pairs, see `TWINS`),
        ``"pku-saferlhf"``, ``"hex-phi"`` or ``"hh-rlhf"`` (the paper's, from the hub), any
        ``owner/name`` on the hub, or a set or file as for `igcore.load_prompts`. A mapping gives
        options beside its ``name``, see `PromptOptions`.
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
        If a set by name or of the hub is not in the cache and cannot be fetched, or is not what it
        should be.
    """
    Choice(split, limit, hardest)
    if hardest and cost is None:
        raise ParameterError(f"hardest {hardest} needs a cost to rank the prompts by")
    source, options = check_prompts(name)
    if from_hub(source):
        set_name, parts = source, hub_texts(source, options)
    else:
        set_name, whole = reading.texts_of(source, options.column)
        parts = {"all": whole}
    if source in TWINS:
        prompts = _with_twins_in(split, source, parts["all"])
    else:
        prompts = reading.as_prompts(_in_split(parts, split), set_name)
    if not prompts:
        raise ParameterError(
            f"prompt set {source!r} has no prompts in split {split!r}; choose another split or set"
        )
    if options.only is not None:
        prompts = _only(prompts, options.only)
    ordered = _hardest_first(prompts, hardest, cost) if hardest and cost else prompts
    chosen = sorted(ordered[:limit], key=attrgetter("id"))
    if options.system is not None:
        chosen = [_after_system(prompt, options.system) for prompt in chosen]
    counts = [f"{part} {len(rows)} rows, {len(set(rows))} unique" for part, rows in parts.items()]
    message = "prompt set %s: %s; split %s %d, chosen %d"
    log.info(message, source, "; ".join(counts), split, len(prompts), len(chosen))
    return chosen


def check_prompts(name: str | Path | Mapping[str, Any] | Named) -> tuple[str, PromptOptions]:
    """Return the set, a name or a path, and its options; reads no file.

    Raises
    ------
    ParameterError
        For an unknown set or option, or an option of the wrong type or value.
    """
    chosen = Named.of(name, "prompt set")
    source = chosen.name
    allowed = ["only", "system"]
    if from_hub(source):
        allowed += ["column", "revision", "subset", "part"]
    elif Path(source).suffix in reading.READERS:
        allowed += ["column"]
    elif source not in PROMPT_SETS:
        others = f", owner/name on the hub{reading.FILES}"
        raise unknown_name("prompt set", source, PROMPT_SETS, others)
    chosen.check_options("prompt set", allowed)
    return source, PromptOptions(**chosen.options)


def from_hub(source: str) -> bool:
    """True if a set is a data set of the hub."""
    is_file = Path(source).suffix in reading.READERS
    return source in SOURCES or bool(HUB_NAME.fullmatch(source)) and not is_file


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


def _with_twins_in(split: str, name: str, texts: list[str]) -> list[Prompt]:
    """Return the prompts of a set whose twins are in a split, in the order of the twins' ids."""
    twins_name, twins = reading.texts_of(TWINS[name], "")
    text_of = dict(zip(twins, texts, strict=True))
    chosen = reading.as_prompts(_in_split({"all": twins}, split), twins_name)
    return [as_prompt(text_of[twin.text], name) for twin in chosen]


def _only(prompts: list[Prompt], file: str) -> list[Prompt]:
    """Return the prompts whose ids a text file lists, see `PromptOptions`."""
    path = root() / file
    try:
        lines = reading.read_text(path).splitlines()
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


def _after_system(prompt: Prompt, system: str) -> Chat:
    """Return a prompt after a system message, which no scorer sees."""
    messages = (("system", system), ("user", prompt.text))
    return Chat(prompt.id, prompt.text, prompt.set_name, messages)


def _hardest_first(prompts: list[Prompt], count: int, cost: Scorer) -> list[Prompt]:
    """Return the prompts, first the `count` whose text has the highest cost; ties keep order."""
    texts = [prompt.text for prompt in prompts]
    scores = checked_score(cost, [""] * len(texts), texts, [True] * len(texts))
    costs = np.where(np.isfinite(scores), scores, np.inf)
    ranked = np.argsort(-costs, kind="stable")
    hardest = [prompts[i] for i in ranked[:count]]
    return hardest + [prompt for prompt in prompts if prompt not in hardest]


# --- the sets -------------------------------------------------------------------------------------


def rtp() -> list[str]:
    """Return the openings of RealToxicityPrompts, topic by topic."""
    folder, _ = sound("rtp")
    topics = sorted(folder.glob("rtp_*.txt"))
    return [line for file in topics for line in file.read_text(encoding="utf-8").split("\n")]


def strongreject() -> list[str]:
    """Return the requests of StrongREJECT."""
    folder, _ = sound("strongreject")
    return reading.file_texts(folder / "strongreject_dataset.csv", "forbidden_prompt")


def _wsr(kind: str) -> list[str]:
    """Return the prompts of Weighted Safety Refusal of one kind; twins have the same place."""
    folder, _ = sound("wsr")
    lines = (folder / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["input"] for row in rows if row["metadata"]["type"] == kind]


wsr_harmful, wsr_harmless = partial(_wsr, "harmful"), partial(_wsr, "benign")


def hub_texts(name: str, options: PromptOptions) -> dict[str, list[str]]:
    """Return the prompts of a data set of the hub for each of its parts, in file order.

    A set with a train and a test part has those two, any other its only part, as ``all``. Rows
    without a prompt are left out, and a warning counts them. Tests read local copies; a download
    of a set that has no name here was not tried.

    Parameters
    ----------
    name : str
        A key of `SOURCES`, or ``owner/name``.

    Raises
    ------
    AssetError
        When the set cannot be fetched, see `igcore.models.hub.snapshot`, or has no such subset,
        part or column.
    """
    repo = SOURCES.get(name, name)
    folder = snapshot(repo, options.revision, kind="dataset")
    load_dataset = needs("datasets").load_dataset
    try:
        with TemporaryDirectory() as cache:  # nothing stays in the user's home
            where = {"streaming": True, "cache_dir": cache, **LAYOUTS.get(repo, {})}
            parts = dict(load_dataset(str(folder), options.subset, **where))
            if options.part is not None:
                parts = {options.part: parts[options.part]}
            elif {"train", "test"} <= parts.keys():
                parts = {part: parts[part] for part in ("train", "test")}
            elif len(parts) > 1:
                raise reading.Unreadable(f"has the parts {', '.join(parts)}; choose one as part")
            cells = {part: reading.cells_of(rows, options.column) for part, rows in parts.items()}
    # datasets, pandas and pyarrow have errors of their own, without a common base
    except Exception as why:
        reason = f"it {why}" if isinstance(why, reading.Unreadable) else one_line(why)
        raise AssetError(
            f"data set {repo!r} cannot be read in {folder} ({reason:.300}); choose "
            "another revision, subset, part or column, or download it again"
        ) from why
    texts = {}
    for part, found in cells.items():
        texts[part] = [cell for cell in found if isinstance(cell, str) and cell.strip()]
        if lost := len(found) - len(texts[part]):
            message = "%d of %d rows of part %r of %s have no prompt and are left out"
            log.warning(message, lost, len(found), part, repo)
    return texts


def _whole(name: str) -> list[str]:
    """Return the prompts of a data set of the hub; of its test part where its owners divided it."""
    return _in_split(hub_texts(name, PromptOptions()), "all")


pku_saferlhf, hex_phi, hh_rlhf = (partial(_whole, name) for name in SOURCES)
