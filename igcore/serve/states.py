"""Experimental: a vLLM server writes the hidden states of a middle layer, which a critic reads.

It was tested on a CPU, not with vLLM's own connector, which needs a GPU.

With its speculative method ``extract_hidden_states`` vLLM writes the states of the tokens that it
reads to files, one for each request (docs/guard.md has the command). In this mode vLLM rejects
logit biases, which retries need, so the states come from a second server. It samples nothing: a
request sends the whole sequence as a prompt, so that the file includes the state of the last token.
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
# nested JSON and a loop of links raise a RuntimeError, and a missing fcntl an ImportError
BAD_FILE = OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, SafetensorError
# vLLM samples at least one token
ONE_TOKEN = {"max_tokens": 1, "n": 1, "temperature": 0.0, "min_p": 0.0}


@settings(kw_only=True)
class StatesOptions:
    """Where a critic on a middle layer gets hidden states: experimental.

    Attributes
    ----------
    server : str
        Address of a vLLM that serves the model with ``extract_hidden_states``, by the same name.
        It is a second server, because in this mode vLLM rejects logit biases, which retries need.
    folder : str
        The folder in which that server writes the states, as a path on this computer.
    """

    server: str
    folder: str


class HiddenStates:
    """Reads the hidden states of a served model from the files that the server writes.

    Parameters
    ----------
    server : Server
        A vLLM that serves the model with ``extract_hidden_states`` and one layer.
    folder : Path
        The folder in which it writes, as a path on this computer.
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
            When the server writes no states for these tokens.
        """
        replies = self.server.complete([ONE_TOKEN | {"prompt": list(ids)} for ids in sequences])
        return [self._states(*pair) for pair in zip(replies, sequences, strict=True)]

    def _states(self, reply: bytes, ids: Sequence[int]) -> Tensor:
        """Return the states of the file that a reply names."""
        try:
            # the name alone: the folder may have another path on the server, and no file outside
            # it may be read or removed
            name = Path(json.loads(reply)["kv_transfer_params"]["hidden_states_path"]).name
            found = load(self._complete_content(self.folder / name))
            states, read = found["hidden_states"], found["token_ids"].flatten().tolist()
        except BAD_FILE as error:
            raise self._error(f"{type(error).__name__}: {error}") from None
        if read != list(ids) or states.shape != (len(ids), 1, self.width):
            shape = tuple(states.shape)
            raise self._error(
                f"{name} has states of shape {shape} for {len(read)} tokens, expected one layer of "
                f"width {self.width} for {len(ids)} tokens"
            )
        return states[:, 0].to(torch.float32)

    def _complete_content(self, path: Path) -> bytes:
        """Wait until a file is complete; return its content and remove it.

        The server locks a second file before it replies, and unlocks it when the first is complete.
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

    def _error(self, why: str) -> PolicyError:
        """Return the error for missing states."""
        return PolicyError(
            f"the server at {self.server.url} wrote no hidden states ({' '.join(why.split())}); "
            "serve the model by vLLM with extract_hidden_states, one layer and the folder that "
            "states names"
        )
