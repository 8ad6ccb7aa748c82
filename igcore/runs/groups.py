"""The groups of prompts that a run decodes together, and those of them that belong to a shard."""

from collections.abc import Sequence
from typing import Any

from ..policy import Prompt


def groups_of(params: Any, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return the groups of ``group_size`` consecutive prompts that belong to a shard.

    A shard has the groups whose number is ``shard`` modulo ``n_shards``, which may be none.
    """
    # whole groups, because float sums depend on which prompts share a batch: so neither the number
    # of shards nor a resume changes a result
    groups = [
        list(prompts[i : i + params.group_size]) for i in range(0, len(prompts), params.group_size)
    ]
    return groups[params.shard :: params.n_shards]
