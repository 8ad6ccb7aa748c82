"""Time and memory counts of any variant."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch.utils.weak import WeakIdKeyDictionary

from igcore.engine.kv_cache import cache_name

SIZES = ["prompts", "prompt_tokens", "n_samples", "new_tokens"]
COUNTS = ["kv_bytes", "forward_tokens", "padding"]
PER_PROMPT = ["cpu_s_per_prompt", "wall_s_per_prompt", "tokens_per_s"]
COLUMNS = ["variant", *SIZES, "dtype", *PER_PROMPT, *COUNTS, "repeats", "measured"]


@dataclass(frozen=True)
class Case:
    """One row of the table: a variant under one setting.

    Attributes
    ----------
    variant : str
        What the table calls it.
    run : str
        What is run, a key of `benchmarks.plan.VARIANTS`.
    models : str
        What it decodes from, a key of `benchmarks.models.MODELS`.
    prompts, prompt_tokens : int
        How many prompts, of how many tokens each.
    shortest : int
        Tokens of the shortest prompt where lengths are uneven; `prompt_tokens` is then the longest.
    n_samples, new_tokens, keep, block : int
        Sizes of the search.
    """

    variant: str
    run: str
    models: str = "smollm2"
    dtype: str = "float32"
    prompts: int = 1
    prompt_tokens: int = 40
    n_samples: int = 16
    new_tokens: int = 64
    keep: int = 4
    block: int = 16
    shortest: int = 0

    @property
    def lengths(self) -> list[int]:
        """The tokens of each prompt, evenly spaced from the longest to the shortest."""
        spread = self.prompt_tokens - (self.shortest or self.prompt_tokens)
        return [
            self.prompt_tokens - i * spread // max(self.prompts - 1, 1) for i in range(self.prompts)
        ]

    def __str__(self) -> str:
        """Return variant, sizes and dtype as text."""
        sizes = f"{self.prompts} x {self.prompt_tokens} tokens, {self.n_samples} samples of"
        return f"{self.variant}: {sizes} {self.new_tokens}, {self.dtype}"


class Meter:
    """Count what passes through the decoders of some models while the meter is entered.

    Other models are not counted.

    Attributes
    ----------
    tokens, padding : int
        Positions encoded that hold a token, and that hold none.
    kv_bytes : int
        Peak bytes of the KV cache at the end of a forward pass, over all models.
    """

    def __init__(self, models: Sequence):
        """Meter these models, each once."""
        self.models = {id(model): model for model in models}.values()
        self.kv_bytes = self._positions = self._tokens = 0
        # keys of a first layer -> how many layers there are
        self._alive = WeakIdKeyDictionary()

    def __enter__(self) -> "Meter":
        """Attach hooks to the decoders."""
        self._hooks = []
        for model in self.models:
            self._attach(model)
        return self

    def _attach(self, model) -> None:
        """Attach the hooks of one model."""
        base, layers = model.base_model, model.config.num_hidden_layers

        def count(_module, _args, kwargs) -> None:
            tokens, positions = _counts(kwargs)
            self._tokens += tokens
            self._positions += positions

        def watch(_module, _args, kwargs, _output) -> None:
            self._watch(kwargs.get(cache_name(base)), layers)

        self._hooks += [
            base.register_forward_pre_hook(count, with_kwargs=True),
            base.register_forward_hook(watch, with_kwargs=True),
        ]

    def __exit__(self, *_) -> None:
        """Remove the hooks and compute the sums."""
        for hook in self._hooks:
            hook.remove()
        self.tokens = self._tokens
        self.padding = self._positions - self.tokens

    def _watch(self, cache, layers: int) -> None:
        """Note the cache of a forward pass; all layers are alike, so the first one is enough."""
        if cache is None:
            return
        shared = not hasattr(cache, "layers")
        parts = [cache.prompts, cache.slab] if shared else [cache.layers[0]]
        for part in parts:
            self._alive[part.keys[0] if shared else part.keys] = layers
        sizes = {}
        for keys, n in self._alive.items():
            storage = keys.untyped_storage()
            sizes[storage.data_ptr()] = 2 * n * storage.nbytes()
        self.kv_bytes = max(self.kv_bytes, sum(sizes.values()))


def _counts(kwargs: Mapping) -> tuple[int, int]:
    """Return the tokens and the positions of a forward pass."""
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]  # (R, S)
    return int(real.sum()), ids.numel()


def timed(work: Callable[[], list[str]], models: Sequence, prompts: int) -> dict:
    """Do a piece of work once and return what it took, as JSON values.

    Parameters
    ----------
    models : sequence
        The language models to meter.

    Raises
    ------
    AssertionError
        Unless it answers every prompt.
    """
    with Meter(models) as meter:
        cpu, wall = time.process_time(), time.perf_counter()
        answers = work()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert len(answers) == prompts and all(isinstance(answer, str) for answer in answers)
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "forward_tokens": meter.tokens,
        "padding": meter.padding,
        "kv_bytes": meter.kv_bytes,
    }


def line(case: Case, repeat: int, found: Mapping) -> dict:
    """Return a line of ``responses.jsonl``: case, repeat, time of day and what `timed` found."""
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    name = {"method": repr(case), "prompt_id": str(repeat), "measured": at}
    return name | asdict(case) | dict(found)


def table(lines: Sequence[dict], sections: Mapping[str, Sequence[Case]]) -> pd.DataFrame:
    """Return one row per planned case, with the columns `COLUMNS` and ``repr(case)`` as index.

    Numbers are medians over the repeats. ``measured`` says when the first repeat was written.

    ``tokens_per_s`` counts sampled tokens, n_samples * new_tokens of every prompt, by wall time.
    ``kv_bytes``, ``forward_tokens`` and ``padding`` are those of the whole run over all prompts,
    policy and scorers together.
    """
    groups = pd.DataFrame(lines).astype(dict.fromkeys(COUNTS, float)).groupby("method")
    rows = groups.first()
    medians = groups.median(numeric_only=True)
    rows[medians.columns] = medians
    rows["repeats"] = groups.size()
    rows["cpu_s_per_prompt"] = rows["cpu_s"] / rows["prompts"]
    rows["wall_s_per_prompt"] = rows["wall_s"] / rows["prompts"]
    tokens = rows["prompts"] * rows["n_samples"] * rows["new_tokens"]
    rows["tokens_per_s"] = tokens / rows["wall_s"]
    planned = dict.fromkeys(repr(case) for cases in sections.values() for case in cases)
    rows = rows.loc[list(planned), COLUMNS]
    rows[COUNTS] = rows[COUNTS].round()  # the median of two counts may lie between them
    return rows.astype(dict.fromkeys(COUNTS, int))
