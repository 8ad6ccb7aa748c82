"""The identity of a run: code, versions, models and prompts, identified by content hashes.

A run folder keeps this identity; when it changes, the run starts again. The packages count by one
digest each: of igcore, of igserve, and of the parts of igstudy that make records. A module that a
user names counts by its own file, see `igstudy.sources`, and some libraries by version.
"""

import ast
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from igcore import Policy, Prompt, Scorer
from igcore.files import DIGITS, digest_of
from igcore.models.templates import STRFTIME

from ..linefile import Fields
from ..provenance import versions
from ..sources import all_parts, identified, module_digests, package_digest, tree_digest

# modules and folders of igstudy that make records or decide how a line is stored
RECORDING = ("runs", "scorers", "prompts", "baselines", "training", "sources", "linefile")
DATE = date(2025, 2, 3)  # that chat templates write: the day of the paper


def code_of(*modules: str) -> dict[str, str]:
    """Return the digests of the code that makes records: the packages, and modules of a user."""
    own = {
        "igcore": package_digest("igcore"),
        "igserve": package_digest("igserve"),
        "igstudy": package_digest("igstudy", *RECORDING),
    }
    return own | module_digests(*modules)


def notebook_digest(path: Path | str) -> str:
    """Return the digest of a notebook's code cells; a line such as ``%matplotlib`` is a text."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = "\n".join(code).splitlines()
    python = [repr([line]) if line.lstrip().startswith(("%", "!")) else line for line in lines]
    return tree_digest(ast.parse("\n".join(python)))


@contextmanager
def dated() -> Iterator[None]:
    """Have chat templates write `DATE` inside the block, so that no answer depends on the day."""
    before = STRFTIME.set(DATE.strftime)
    try:
        yield
    finally:
        STRFTIME.reset(before)


def prompts_digest(prompts: Iterable[Prompt]) -> Fields:
    """Return number and digest of prompts (``id`` and ``text``), independent of their order."""
    pairs = sorted([prompt.id, prompt.text] for prompt in prompts)
    return {"n": len(pairs), "digest": digest_of(pairs)[:DIGITS]}


def part_identity(part: Any) -> Fields:
    """Return the identity of a policy or scorer by content.

    It is ``identity()`` where the part has one, else its name and digest; its files are added.
    """
    found: Fields = {"name": part.name, "digest": part.digest}
    if hasattr(part, "identity"):
        found = part.identity()
    if files := getattr(part, "files", None):
        found = found | {"files": dict(files)}
    return found


def models_identity(
    policy: Policy, cost: Scorer, reward: Scorer | None, prompts: Iterable[Prompt], *modules: str
) -> Fields:
    """Return the inputs other than settings: models, code, versions, device and prompts.

    Parameters
    ----------
    modules : str
        Dotted names of modules of a user that make the lines.

    Raises
    ------
    RunError
        See `igstudy.sources.identified`.
    """
    model = policy.model
    parts = {
        "policy": part_identity(policy),
        "cost": part_identity(identified(cost)),
        "reward": None if reward is None else part_identity(identified(reward)),
    }
    return {
        "parts": parts,
        "code": code_of(*modules, *modules_of(policy, cost, reward)),
        "versions": versions(),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "chosen": prompts_digest(prompts),
    }


def modules_of(*parts: Any) -> list[str]:
    """Return the modules that define policies and scorers, or from which they were loaded."""
    modules = []
    for part in chain.from_iterable(map(all_parts, parts)):
        modules += [type(part).__module__, getattr(part, "home", None)]
    return [module for module in modules if module]


def file_stamps(policy: Policy) -> dict[str, list[int]]:
    """Return size and time (ns) of the files of a policy: a change shows without reading them."""
    names = getattr(policy, "files", {})
    files = [Path(policy.tokenizer.name_or_path, name) for name in names]
    found = {file: file.stat() for file in files if file.is_file()}
    return {str(file): [stat.st_size, stat.st_mtime_ns] for file, stat in found.items()}
