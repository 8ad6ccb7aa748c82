"""Folders of models and data sets by name: local folders, a mirror, or the model hub.

``IGCORE_HUB`` may name a mirror for computers without network: a folder that contains models and
data sets as ``<owner>/<name>``. The hub is then not used.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import AssetError, ParameterError, one_line

MIRROR = "IGCORE_HUB"
PATHS = (".", "/", "~")  # how a path begins, and no name on the hub
# settings and tokenizers
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.codes", "*.spm", "*.tokenizer")
# weights; pickles are downloaded only if there are no safetensors
SAFE, PICKLED = "model*.safetensors", "pytorch_model*.bin"


def snapshot(
    repo: str, revision: str | None = None, kind: str = "model", patterns: Sequence[str] = ()
) -> Path:
    """Return the folder of a model or data set; download missing files.

    Parameters
    ----------
    repo : str
        A local folder, or ``owner/name`` in the mirror or on the hub.
    revision : str, optional
        Commit, tag or branch on the hub, by default the newest state. Name a commit to reproduce
        numbers later.
    kind : str
        ``model`` or ``dataset``.
    patterns : sequence of str
        Downloads these files alone; by default the settings, tokenizer and weights of a model, and
        all files of a data set.

    Raises
    ------
    ParameterError
        When there is no such folder.
    AssetError
        When it is not in the mirror, does not exist, cannot be reached, or needs access that was
        not granted.
    """
    if os.path.isdir(local := os.path.expanduser(repo)):  # False for an impossible path
        return Path(local)
    if repo.startswith(PATHS):
        raise ParameterError(
            f"there is no folder {repo:.100}, seen from {Path.cwd()}; give another"
        )
    if mirror := os.environ.get(MIRROR):
        folder = Path(os.path.expanduser(mirror), repo)
        if not os.path.isdir(folder):
            raise AssetError(f"{kind} {repo!r} is not in {MIRROR}={mirror}; copy it to {folder}")
        return folder
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, repo, revision=revision, repo_type=kind)
    whole = kind == "model" and not patterns
    try:
        folder = Path(download(allow_patterns=[*SMALL, SAFE] if whole else [*patterns] or None))
        if whole and not any(folder.glob(SAFE)):
            download(allow_patterns=[PICKLED])
        return folder
    except Exception as error:  # errors of network, hub and disk have no common base class
        raise AssetError(
            f"{kind} {repo!r} cannot be fetched ({one_line(error.__cause__ or error)}); check its "
            f"name and revision {revision!r}, ask for access on its page and log in with `hf auth "
            f"login` if it is gated, or put a copy into the folder that {MIRROR} names"
        ) from error
