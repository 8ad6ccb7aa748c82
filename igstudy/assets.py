"""The pinned downloads of the study beside those of `igcore.models.assets`.

``python -m igstudy fetch`` fills the cache with both.
"""

from importlib.resources import files

from igcore.models.assets import ASSETS, fetched, pinned, sound

__all__ = ["fetched", "sound"]

ASSETS |= pinned(files(__package__) / "data/pins.json", {})
