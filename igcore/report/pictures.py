"""How a picture is written: the same figure gives the same bytes."""

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ..files import replace_file
from .sources import sidecar

RC = {  # how every picture looks, whether it is drawn or written
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture everywhere
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "image.cmap": "viridis",  # perceptually uniform
    "grid.color": "#e6e6e6",
    "pdf.fonttype": 42,
}
# what matplotlib would write into each kind of file by itself: the time, and its own version
METADATA = {".pdf": {"CreationDate": None}, ".png": {"Software": None}}


def save(fig: Figure, stem: Path | str, sources: Mapping[str, dict] | None = None) -> list[Path]:
    """Write ``stem.pdf`` and ``stem.png`` (200 dots per inch), and return their paths.

    `sources` are the runs of which the picture was made, see `igcore.report.sources.of_runs`; a
    third file, ``stem.json``, names them.
    """
    stem = Path(stem)
    paths = [stem.with_name(stem.name + suffix) for suffix in METADATA]
    for path in paths:
        content = io.BytesIO()
        with matplotlib.rc_context(RC):
            fig.savefig(content, format=path.suffix[1:], dpi=200, metadata=METADATA[path.suffix])
        replace_file(path, content.getvalue())
    if sources is not None:
        paths.append(stem.with_name(stem.name + ".json"))
        replace_file(paths[-1], sidecar(sources))
    return paths
