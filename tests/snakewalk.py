"""Snakemake in the process of the tests: importing it anew for every call takes seconds."""

import contextlib
import gc
import io
import os
import warnings
from pathlib import Path

from snakemake import cli

ROOT = Path(__file__).parents[1]


def snakemake(place, profile, *arguments, **config) -> str:
    """Call Snakemake in this process and return what it printed; SystemExit when it stopped with an
    error.
    """
    config = [f"{name}={value}" for name, value in ({"profile": profile} | config).items()]
    command = [*arguments, "--cores", "1", "--directory", str(place)]
    command += ["--snakefile", str(ROOT / "Snakefile")]
    out, here = io.StringIO(), Path.cwd()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # it leaves its temporary folders to the collector
        try:
            cli.main([*command, "--config", *config])
        except SystemExit as stop:
            if stop.code:
                raise SystemExit(f"{out.getvalue()}{stop.code}") from None
        finally:
            os.chdir(here)
            gc.collect()
    return out.getvalue()
