"""Folders of models and data sets by name: local folders, a mirror, or the model hub.

``IGCORE_HUB`` may name a mirror: a folder that holds them as ``<owner>/<name>``, as on a cluster
without network. No other place is then searched.
"""

import os
from functools import partial
from pathlib import Path

from ..errors import AssetError, said

MIRROR = "IGCORE_HUB"
# settings and tokenizers
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.codes", "*.spm", "*.tokenizer")
# weights: the second kind only where the first is not there
SAFE, PICKLED = "model*.safetensors", "pytorch_model*.bin"


def snapshot(
    repo: str, revision: str | None = None, kind: str = "model", weights: bool = True
) -> Path:
    """Return the folder that holds a model or data set; download what is not there.

    Parameters
    ----------
    repo : str
        A local folder, or ``owner/name`` in the mirror or on the hub.
    revision : str, optional
        Commit, tag or branch on the hub; by default its newest state. A commit keeps next year's
        numbers the same.
    kind : str
        ``model`` or ``dataset``.
    weights : bool
        Whether a model's weights are wanted, or its settings and tokenizer alone.

    Raises
    ------
    AssetError
        When it is not in the mirror, does not exist, asks for access that was not granted, or
        cannot be reached.
    """
    if os.path.isdir(local := os.path.expanduser(repo)):  # False for what no path can be
        return Path(local)
    if mirror := os.environ.get(MIRROR):
        folder = Path(os.path.expanduser(mirror), repo)
        if not os.path.isdir(folder):
            raise AssetError(f"{kind} {repo!r} is not in {MIRROR}={mirror}; copy it to {folder}")
        return folder
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, repo, revision=revision, repo_type=kind)
    if kind == "dataset":
        patterns = None  # all files
    else:
        patterns = [*SMALL, SAFE] if weights else [*SMALL]
    try:
        folder = Path(download(allow_patterns=patterns))
        if patterns and SAFE in patterns and not any(folder.glob(SAFE)):
            download(allow_patterns=[PICKLED])
        return folder
    except Exception as error:  # what the network, the hub or the disk may raise has no common base
        raise AssetError(
            f"{kind} {repo!r} cannot be fetched ({said(error.__cause__ or error)}); check its name "
            f"and revision {revision!r}, ask on its page of the hub for access and log in with `hf "
            f"auth login` if it is gated, or put a copy into the folder that {MIRROR} names"
        ) from error
