"""Tables from files and folders through the `datasets` library, silently and without its cache."""

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Unreadable(Exception):
    """Files hold no table of the wanted form.

    The message says why; the caller makes a full sentence of it.
    """


@contextmanager
def opened(place: str | Path, **options) -> Iterator[dict]:
    """Load files for the time of a block.

    Parameters
    ----------
    place : str or Path
        A format of the `datasets` library, or a folder laid out as a data set of the hub is, with
        its README or without.
    **options
        Of ``datasets.load_dataset``.

    Yields
    ------
    dict
        The table of every part.

    Raises
    ------
    Unreadable
        For whatever the library or a format refuses.
    """
    import datasets
    from pandas.errors import ParserWarning

    with tempfile.TemporaryDirectory() as cache, _quiet(datasets), warnings.catch_warnings():
        # pandas only warns when it drops part of a row
        warnings.simplefilter("error", ParserWarning)
        # linked under a plain path: in any other the library takes brackets for a pattern
        if isinstance(place, Path):
            place = str(
                shutil.copytree(place.resolve(), Path(cache, "linked"), copy_function=os.symlink)
            )
        try:
            tables = datasets.load_dataset(place, cache_dir=cache, **options)
        # an empty, broken or wrongly encoded file raises a dozen different types
        except Exception as error:
            reason = error.__cause__ or error
            said = " ".join(str(reason).split()).replace(f"{cache}/linked/", "")
            raise Unreadable(f"{type(reason).__name__}: {said}") from error
        yield tables


@contextmanager
def _quiet(datasets) -> Iterator[None]:
    """Silence the library's progress bars and log inside the block, and restore them afterwards."""
    bars, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
