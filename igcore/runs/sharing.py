"""What runs have drawn in a second, and what they need not draw because a pool has it."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from ..beams import Method, method_of, settings_of
from ..config import SearchConfig
from ..folders import read
from .decode_params import DecodeParams
from .rollout_run import METHOD as ROLLOUTS

# while no block is retried, these search as others do
SAME = {"inferenceguard": "beam-augmented", "beam-lagrangian-freq": "beam-lagrangian"}
# settings that do not change what is sampled while no block is retried
NO_MATTER = "group_size probe_fail_open on_failure refusal failure_rate rounds diversity".split()


class Sharing:
    """The samples that the runs so far have left in their pools, if no block is retried.

    Samples of one prompt begin with the same tokens whatever the method and its N: the first block
    of a search is the head of as many samples of Best-of-N. Later blocks are shared only by
    searches that keep the same beams.
    """

    def __init__(self) -> None:
        # prompts and policy -> length of each sample from the prompt, by its number
        self.heads: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.walks: set[str] = set()  # searches whose later blocks are there

    def drawn(self, params: DecodeParams, method: str) -> float:
        """Return the tokens per prompt that a method of a run must draw itself, and note them."""
        how, config = method_of(method), settings_of(method, params.search())
        whole = config.n_samples * config.max_new_tokens
        if not params.pool or how.search != Method.search:  # ARGS and RE-Control share nothing
            return whole
        source = str([params.pool, params.policy, params.dtype, params.prompts, params.split])
        source += str([params.seed, params.limit, params.hardest])
        heads, length = self.heads[source], config.block_size
        new = 0
        for sample in range(config.n_samples):
            new += max(0, length - heads[sample])
            heads[sample] = max(length, heads[sample])
        walk = source + SAME.get(method, method) + _decisive(config)
        if length < config.max_new_tokens and walk not in self.walks:
            new += whole - config.n_samples * length
            self.walks.add(walk)
        return new


def _decisive(config: SearchConfig) -> str:
    """Return the settings that decide which beams a search keeps."""
    return str({name: value for name, value in asdict(config).items() if name not in NO_MATTER})


def measured(runs: Path) -> dict[tuple[str, str], float]:
    """Return tokens per second for each policy and method of the finished runs in a folder.

    Runs with a pool are left out: what they found there took no time.
    """
    drawn: Counter = Counter()
    seconds: Counter = Counter()
    for path in sorted(runs.glob("**/responses.jsonl")):
        finished = path.with_name("manifest.json").is_file()
        params = path.with_name("params.json")
        pooled = params.is_file() and json.loads(params.read_text(encoding="utf-8")).get("pool")
        for line in read(path) if finished and not pooled else []:
            pair = line["policy"], line["method"]
            rollouts = line["method"] == ROLLOUTS
            drawn[pair] += sum(map(len, line["tokens"])) if rollouts else line["policy_tokens"]
            seconds[pair] += line["generate_s"] + line["score_s"]
    return {pair: drawn[pair] / seconds[pair] for pair in drawn}
