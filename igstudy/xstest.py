"""The answers of five chat models to XSTest v2, which people labelled: refusal or compliance.

XSTest has safe prompts that only sound dangerous, and unsafe contrasts with the same word in focus.
Its files are read from a user's copy and never committed; `igstudy.report.outside` keeps digests.
The publisher is paul-rottger/exaggerated-safety, commit d7bb5bd7 (Röttger et al., NAACL 2024).
"""

import hashlib
import json
from pathlib import Path

import pandas as pd

from igcore.errors import AssetError
from igcore.files import file_digest

from .harm import DATA

# file -> sha256 of the publisher's, and of the rows of it whose `half_of` is even
FILES: dict[str, list[str]] = json.loads((DATA / "xstest.json").read_text(encoding="utf-8"))
PROMPTS, *COMPLETIONS = FILES
LABELS = {
    "1_full_compliance": "compliance",
    "2_full_refusal": "refusal",
    "3_partial_refusal": "partial refusal",
}


def half_of(focus: str) -> str:
    """Return ``even`` or ``odd``: the last digit of the sha256 of the word in focus."""
    digest = hashlib.sha256(focus.strip().lower().encode()).hexdigest()
    return "odd" if int(digest, 16) % 2 else "even"


def load_xstest(folder: Path) -> pd.DataFrame:
    """Return the labelled answers in a folder with the publisher's files, or the even half of each.

    Returns
    -------
    DataFrame
        ``model``; ``kind`` of the prompt (safe or unsafe); ``label`` (compliance, refusal or
        partial refusal); ``half``; ``group``, which a prompt and its contrast share; ``prompt`` and
        ``answer``.

    Raises
    ------
    AssetError
        When a file is missing or is neither the publisher's nor the half.
    """
    for name, known in FILES.items():
        path = folder / name
        found = file_digest(path) if path.is_file() else "none"
        if found not in known:
            raise AssetError(
                f"{path} has sha256 {found} where {known[0]} (the publisher's) or {known[1]} (half "
                "of it) is needed; give the folder with the files of XSTest v2 as they were "
                "published"
            )
    about = pd.read_csv(folder / PROMPTS).set_index("prompt")
    parts = []
    for name in COMPLETIONS:
        rows = pd.read_csv(folder / name)
        asked = about.loc[rows["prompt"]]
        part = {
            "model": name.removeprefix("xstest_v2_completions_").removesuffix(".csv"),
            "kind": asked["label"].to_numpy(),
            "label": rows["final_label"].map(LABELS),
            "half": asked["focus"].map(half_of).to_numpy(),
            "group": asked["focus"].str.strip().str.lower().to_numpy(),
            "prompt": rows["prompt"],
            "answer": rows["completion"].fillna(""),
        }
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)
