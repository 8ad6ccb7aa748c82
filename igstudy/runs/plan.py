"""The runs of params files before they start, and the most tokens that a prompt of each can take.

``python -m igstudy plan FILE.yaml ...`` prints them. No weights are loaded and nothing is
downloaded.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from igcore.beams import method_of
from igcore.errors import IgcoreError, ParameterError

from .critic_params import CriticParams
from .decode_params import DecodeParams
from .paramfiles import DECODED, ParamFiles

PARAMS_OF_KIND = {"critic": CriticParams} | dict.fromkeys(DECODED, DecodeParams)


def most_tokens(params: CriticParams | DecodeParams) -> int:
    """Return the most tokens that a run samples or considers for one prompt.

    Of a critic these are its rollouts, without the search of its trial.
    """
    if isinstance(params, CriticParams):
        return 0 if params.rollouts else params.n_rollouts * params.max_new_tokens
    found = [method_of(method).settings_under(params.search()) for method in params.methods]
    return sum(each.n_samples * each.max_new_tokens * each.rounds for each in found)


def report(files: Iterable[Path]) -> Iterator[str]:
    """Yield a line for every run of params files; files of other kinds have none.

    Raises
    ------
    ParameterError
        For a file that holds a bad parameter; the sentence names the file.
    """
    yield f"{'tokens a prompt':>15} {'prompts':>8}  run (tokens are the most that it can take)"
    for file in files:
        settings = PARAMS_OF_KIND.get(file.stem.partition("-")[0])
        if settings is None:
            continue
        folder = file.absolute().parent
        try:
            for run, given in ParamFiles(folder.name, base=folder.parent).points(file.absolute()):
                params = settings(**given)
                yield f"{most_tokens(params):15,} {params.limit or 'all':>8}  {run}"
        except IgcoreError as error:
            raise ParameterError(f"{file}: {error}") from error
