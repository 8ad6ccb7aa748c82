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

from ..closure import PACKAGE, known, members_of, source_of, sources, tree_digest
from ..errors import RunError
from ..files import DIGITS, digest_of
from ..policy import Policy, Prompt
from ..report.provenance import versions
from ..scorers import Scorer

HOME = Path(__file__).parents[1]
UNRECORDED = ("report", "figures", "paper", "theory", "watch")  # rooms that make no records
LINES = "report/linefile.py"  # but how a line is stored counts


@cache
def package_digest(*left_out: str) -> str:
    """Return the digest of the package's code, without the rooms that are left out."""
    digests = {}
    for file in sorted(HOME.rglob("*.py")):
        name = file.relative_to(HOME)
        if name.parts[0] not in left_out or name.as_posix() == LINES:
            digests[name.as_posix()] = tree_digest(ast.parse(file.read_bytes()))
    return digest_of(digests)[:DIGITS]


def code_of(*modules: str) -> dict[str, str]:
    """Return the digests of the code that makes records: the package, and modules of a user."""
    return {PACKAGE: package_digest(*UNRECORDED)} | sources(*modules)


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
    if hasattr(part, "identity"):
        found = part.identity()
    else:
        found = {"name": part.name, "digest": part.digest}
    for inner in getattr(part, "parts", (part,)):
        if unknown := getattr(inner, "unknown", ""):
            raise RunError(
                f"scorer {inner.name!r} holds what nobody can tell from another ({unknown}), so a "
                "run would not see it change; give the function a text as its attribute digest, "
                "such as 'v1', and change it with what the function holds"
            )
    if files := getattr(part, "files", None):
        found = found | {"files": dict(files)}
    home = type(part).__module__
    if not home.startswith(f"{PACKAGE}.") and source_of(home) is None:
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
