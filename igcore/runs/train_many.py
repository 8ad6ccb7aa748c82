"""Train the networks of a params file of notebook 20 in several processes, each with its own GPU.

``accelerate launch --num_processes 4 -m igcore.runs.train_many params/paper/critic-llama-hh.yaml``

The first process samples the rollouts that are not there, while the others wait; then all train.
Notebook 20 finds rollouts and networks where it would have left them, and evaluates them.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState

from ..errors import IgcoreError
from .critic_params import CriticParams
from .critic_run import critic_run
from .paramfiles import ParamFiles

WAIT = timedelta(
    days=7
)  # sampling takes hours, and a process gives up after half of one by default


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the networks of a params file; each process of ``accelerate launch`` calls this."""
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.train_many", description=__doc__)
    parser.add_argument("file", type=Path, help="a params file of notebook 20")
    file = parser.parse_args(arguments).file.absolute()
    state = PartialState(timeout=WAIT) if "WORLD_SIZE" in os.environ else PartialState()
    try:
        files = ParamFiles(file.parent.name, base=file.parent.parent)
        ((_, given),) = files.points(file)
        params = CriticParams(**given)
        if torch.cuda.is_available():
            params = replace(params, device=f"cuda:{state.local_process_index}")
        run = critic_run(params)
    except IgcoreError as error:
        sys.exit(f"error: {error}")
    if state.is_main_process:
        print(f"{run.folder} has its networks; notebook 20 evaluates them")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
