"""The output of a middle layer of a model in a vLLM server, which a critic reads: experimental.

It was tested on a processor, and not with vLLM's own connector, which needs a GPU.

vLLM writes the states of the tokens that it reads to files, one for each request, under its
speculative method ``extract_hidden_states`` (docs/guard.md has the command). Under that method it
takes no bias, which retries need, so a server of its own gives the states. No sample is drawn here:
the whole sequence is sent as a prompt, so that the state of its last token is there, too.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import PolicyError
from ..settings import settings
from .server import Server

PAUSE = 0.005  # seconds between two looks at a file that is being written
# a RuntimeError is what JSON without end and a loop of links raise, an ImportError a missing fcntl
UNREADABLE = OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, SafetensorError
ONE = {"max_tokens": 1, "n": 1, "temperature": 0.0, "min_p": 0.0}  # vLLM gives no less than one


@settings(kw_only=True)
class StatesOptions:
    """How a critic on a middle layer gets the states of a model in a server: experimental.

    Attributes
    ----------
    server : str
        Address of a vLLM that serves the model under ``extract_hidden_states``, by the same name.
        It samples nothing: under that method vLLM takes no bias, which retries need.
    folder : str
        Where that server writes the states, as this computer sees it.
    """

    server: str
    folder: str


class HiddenStates:
    """Reads the states of a model in a server from the files that it writes.

    Parameters
    ----------
    server : Server
        A vLLM that serves the model under ``extract_hidden_states``, with one layer.
    folder : Path
        Where it writes, as this computer sees it.
    width : int
        Size H of the model's hidden state.
    """

    def __init__(self, server: Server, folder: Path, width: int):
        self.server, self.folder, self.width = server, folder.resolve(), width
        self.seconds = server.client.timeout

    def read(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the states of every token of some sequences, (n, H) float32 each.

        It removes the files that it has read.

        Raises
        ------
        PolicyError
            When the server gives no states of these tokens.
        """
        replies = self.server.complete([ONE | {"prompt": list(ids)} for ids in sequences])
        return [self._states(*pair) for pair in zip(replies, sequences, strict=True)]

    def _states(self, reply: bytes, ids: Sequence[int]) -> Tensor:
        """Return the states of the file that a reply names."""
        try:
            # the name alone: the server may see the folder at another place, and no file outside
            # it is ever read or removed
            name = Path(json.loads(reply)["kv_transfer_params"]["hidden_states_path"]).name
            found = load(self._written(self.folder / name))
            states, read = found["hidden_states"], found["token_ids"].flatten().tolist()
        except UNREADABLE as error:
            raise self._without(f"{type(error).__name__}: {error}") from None
        if read != list(ids) or states.shape != (len(ids), 1, self.width):
            shape = tuple(states.shape)
            raise self._without(
                f"{name} holds states of shape {shape} for {len(read)} tokens, wanted are those of "
                f"one layer of {self.width} for {len(ids)}"
            )
        return states[:, 0].to(torch.float32)

    def _written(self, path: Path) -> bytes:
        """Return the content of a file when it is complete, and remove it.

        The server holds a lock on a file beside it until then, which it made before it replied.
        """
        import fcntl  # here: Windows has none. A shared lock needs no right to write the file

        lock, end = path.with_name(path.name + ".lock"), time.monotonic() + self.seconds
        with lock.open("rb") as held:
            while True:
                try:
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        late = f"{path.name} is not written after {self.seconds:g} seconds"
                        raise TimeoutError(late) from None
                    time.sleep(PAUSE)
            content = path.read_bytes()
        path.unlink()
        lock.unlink()
        return content

    def _without(self, why: str) -> PolicyError:
        """Return the error for states that are not there."""
        return PolicyError(
            f"the server at {self.server.url} gives no hidden states ({' '.join(why.split())}); "
            "serve the model by vLLM with extract_hidden_states, one layer and the folder that "
            "states names"
        )
