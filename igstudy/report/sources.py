"""Where a table comes from, as a file beside it.

It names the runs that the table was made of, and the commit, the versions and the processor that
wrote it. Each run was run here or read from packed records. A run whose manifest does not say
something, such as an old one, has null there.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..files import root
from ..provenance import UNPACKED, commit, processor, versions
from .load import EXCLUDED_PREFIX

Source = dict[str, Any]  # one run: its origin, hash, commit, versions and processor


def of_runs(profile: str, names: Iterable[str]) -> dict[str, Source]:
    """Return the origin of finished runs from their manifests, for `sidecar`.

    Parameters
    ----------
    profile : str
        Folder of `runs`.
    names : iterable of str
        Of runs below it, in any order and any number of times, such as the column ``run`` of
        records. Of a run in shards each shard is named. Patterns are read as
        `igstudy.report.load.load_runs` does, and may be of other folders: ``*``, ``critics/*``.

    Returns
    -------
    dict
        By ``<profile>/<folder>``: ``from``, which is ``run here`` or, for the archive of the
        profile, ``records``; ``root``, the hash over lines, parameters and prompts; and the
        ``commit``, the ``versions`` and the ``processor`` of the run.
    """
    base = root() / "runs" / profile
    names = set(names)
    patterns = [name + shards for name in names for shards in ("", ".*-of-*")]
    manifests = {path for pattern in patterns for path in base.glob(f"{pattern}/manifest.json")}
    result = {}
    for manifest in sorted(manifests):
        if "*" in names and manifest.parent.name.startswith(EXCLUDED_PREFIX):
            continue
        folder = manifest.parent.relative_to(base).as_posix()
        facts = json.loads(manifest.read_text(encoding="utf-8"))
        result[f"{profile}/{folder}"] = {
            "from": "records" if manifest.with_name(UNPACKED).exists() else "run here",
            "root": facts.get("root_with_texts", facts.get("root")),
            "commit": facts.get("git_commit"),
            "versions": versions_text(facts.get("versions")),
            "processor": facts.get("processor"),
        }
    return result


def versions_text(versions: Mapping[str, str] | None) -> str | None:
    """Return versions as one text, which takes one line of a file."""
    parts = [f"{name} {number}" for name, number in (versions or {}).items()]
    return ", ".join(parts) or None


def sidecar(sources: Mapping[str, Source]) -> str:
    """Return the text of the file beside a table: its runs, and what wrote it.

    ``runs`` is as in `of_runs`, ``written_by`` has the commit, the versions and the processor.

    It holds no time: the same runs on the same machine give the same bytes.
    """
    here = {"commit": commit(), "versions": versions_text(versions()), "processor": processor()}
    made = {"runs": dict(sources), "written_by": here}
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
