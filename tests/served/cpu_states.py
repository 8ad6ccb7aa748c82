"""vLLM's connector of hidden states for a processor, in the environment that has vLLM.

Its own one copies the states on a stream of a GPU. This one takes them from the KV cache as they
are, and writes the same file under the same lock. It imports nothing of igcore.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own


class HiddenStatesOnCpu(own.ExampleHiddenStatesConnector):
    """Writes the states of a request when it is finished."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Write the states of the requests that wait for it, and return the finished ones."""
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                self._write(pending)
        return set(finished_req_ids) or None, None

    def _write(self, pending: Any) -> None:
        """Write one file and release its lock."""
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = own.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
