"""The identity of a run: code, versions and prompts that its answers depend on, known by content.

A run folder keeps this identity; when it changes, the run starts again. The code is that of the
package, and of the modules of a user that it loads, see `igcore.closure`. Modules of other packages
count by version.
"""

import ast
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import igcore
from igcore.files import DIGITS, digest_of
from igcore.policy import Policy, Prompt
from igcore.scorers import Scorer

from ..closure import PACKAGES, identified, known, members_of, source_of, sources, tree_digest
from ..provenance import versions

HOMES = {"igcore": Path(igcore.__file__).parent, "igstudy": Path(__file__).parents[1]}
# what of the study makes records; how a line is stored counts, too
RECORDING = ("runs", "scorers", "prompts.py", "baselines", "closure.py", "linefile.py")


@cache
def package_digest(package: str, *parts: str) -> str:
    """Return the digest of a package's code, or of some parts of it; watching changes none."""
    digests = {}
    for file in sorted(HOMES[package].rglob("*.py")):
        name = file.relative_to(HOMES[package])
        if name.parts[0] != "watch" and (not parts or name.parts[0] in parts):
            digests[name.as_posix()] = tree_digest(ast.parse(file.read_bytes()))
    return digest_of(digests)[:DIGITS]


def code_of(*modules: str) -> dict[str, str]:
    """Return the digests of the code that makes records: the packages, and modules of a user."""
    own = {"igcore": package_digest("igcore"), "igstudy": package_digest("igstudy", *RECORDING)}
    return own | sources(*modules)


def notebook_digest(path: Path | str) -> str:
    """Return the digest of a notebook's code cells; a line such as ``%matplotlib`` is a text."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = "\n".join(code).splitlines()
    plain = [repr([line]) if line.lstrip().startswith(("%", "!")) else line for line in lines]
    return tree_digest(ast.parse("\n".join(plain)))


def prompts_digest(prompts: Iterable) -> dict:
    """Return number and digest of prompts (with ``id`` and ``text``), whatever their order."""
    pairs = sorted([prompt.id, prompt.text] for prompt in prompts)
    return {"n": len(pairs), "digest": digest_of(pairs)[:DIGITS]}


def part_identity(part) -> dict:
    """Return the identity of a policy or scorer by content.

    It is ``identity()`` where the part has one, else its name and digest; its files are added. A
    class that was defined in a notebook has no module to hash, so its members count instead.

    Raises
    ------
    RunError
        For a function that holds what cannot be told from another.
    """
    identified(part)
    if hasattr(part, "identity"):
        found = part.identity()
    else:
        found = {"name": part.name, "digest": part.digest}
    if files := getattr(part, "files", None):
        found = found | {"files": dict(files)}
    home = type(part).__module__
    if home.partition(".")[0] not in PACKAGES and source_of(home) is None:
        found = found | {"code": known(members_of(type(part)))[0]}
    return found


def models_identity(
    policy: Policy, cost: Scorer, reward: Scorer | None, prompts: Iterable[Prompt], *modules: str
) -> dict:
    """Return what lines depend on besides settings: models, code, versions, device and prompts.

    Parameters
    ----------
    modules : str
        Dotted names of modules of a user that make the lines.
    """
    model = policy.model
    parts = {
        "policy": part_identity(policy),
        "cost": part_identity(cost),
        "reward": None if reward is None else part_identity(reward),
    }
    return {
        "parts": parts,
        "code": code_of(*modules, *modules_of(policy, cost, reward)),
        "versions": versions(),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "chosen": prompts_digest(prompts),
    }


def modules_of(*parts) -> list[str]:
    """Return the modules that define policies and scorers, or from which they were loaded."""
    inner = [part for outer in parts for part in getattr(outer, "parts", ())]
    modules = []
    for part in [*parts, *inner]:
        modules += [type(part).__module__, getattr(part, "home", None)]
    return [module for module in modules if module]


def opened(policy: Policy) -> dict[str, list[int]]:
    """Return size and time (ns) of the files of a policy: a change shows without reading them."""
    names = getattr(policy, "files", {})
    files = [Path(names.folder, name) for name in names] if hasattr(names, "folder") else []
    found = {file: file.stat() for file in files if file.is_file()}
    return {str(file): [stat.st_size, stat.st_mtime_ns] for file, stat in found.items()}
