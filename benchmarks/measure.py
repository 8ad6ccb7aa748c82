"""Count and time: what a variant costs, whatever it does."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass

import pandas as pd
import torch
from torch.utils.weak import WeakIdKeyDictionary

from igcore.engine.kv_cache import cache_name
from igcore.engine.prepack import use_prepacked, viewed

SIZES = ["prompts", "prompt_tokens", "n_samples", "new_tokens"]
COUNTS = ["kv_bytes", "forward_tokens", "padding"]
PER_PROMPT = ["cpu_s_per_prompt", "wall_s_per_prompt", "tokens_per_s", "gemm_share"]
COLUMNS = ["variant", *SIZES, "dtype", "device", *PER_PROMPT, *COUNTS, "repeats", "measured"]
NOT_MEASURED = "not measured"


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
    flops : int
        Useful work: 2 per weight of every linear layer and token, 2 per weight of the head and row
        that needs it, and 4 * heads * head_dim per layer and pair of tokens in the attention.
        Padding and embedding look-ups are not counted.
    kv_bytes : int
        Peak bytes of the KV cache at the end of a forward pass, over all models.
    """

    def __init__(self, models: Sequence):
        """Meter these models, each once."""
        self.models = {id(model): model for model in models}.values()
        self.kv_bytes = self._positions = self._tokens = self._flops = 0
        # keys of a first layer -> how many layers there are
        self._alive = WeakIdKeyDictionary()

    def __enter__(self) -> "Meter":
        """Attach hooks to the decoders and their heads."""
        self._hooks = []
        for model in self.models:
            self._attach(model)
        return self

    def _attach(self, model) -> None:
        """Attach the hooks of one model."""
        base, head, config = model.base_model, model.get_output_embeddings(), model.config
        linear = [m for m in base.modules() if isinstance(m, torch.nn.Linear)]
        weights = sum(layer.weight.numel() for layer in linear)
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        # for one query and one key, in all layers: a product with the key and one with the value
        pair_flops = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim

        def count(_module, _args, kwargs) -> None:
            tokens, pairs, positions = _counts(kwargs)
            # tensors on the device, so that a GPU need not wait
            self._tokens += tokens
            self._positions += positions
            self._flops += 2 * weights * tokens + pair_flops * pairs

        def watch(_module, _args, kwargs, _output) -> None:
            self._watch(kwargs.get(cache_name(base)), config.num_hidden_layers)

        def count_head(module, args) -> None:
            self._flops += 2 * module.weight.numel() * args[0][..., 0].numel()

        self._hooks += [
            base.register_forward_pre_hook(count, with_kwargs=True),
            base.register_forward_hook(watch, with_kwargs=True),
        ]
        if head is not None:
            self._hooks.append(head.register_forward_pre_hook(count_head))

    def __exit__(self, *_) -> None:
        """Remove the hooks and compute the sums."""
        for hook in self._hooks:
            hook.remove()
        self.tokens, self.flops = int(self._tokens), int(self._flops)
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


def _counts(kwargs: Mapping) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the tokens, the attended pairs and the positions of a forward pass."""
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the second until 5.23
    rows, length = ids.shape
    if positions is None:
        if mask is None:
            before = 0 if cache is None else cache.get_seq_length()
            mask = ids.new_ones(rows, before + length)
        positions = (mask.cumsum(1) - 1)[:, -length:]
    real = torch.ones_like(ids) if mask is None else mask[:, -length:]  # (R, S)
    # a token at position p looks at p + 1 tokens
    return real.sum(), ((positions + 1) * real).sum(), ids.numel()


@contextmanager
def clocks(device: torch.device) -> Iterator[dict]:
    """Yield a dict, filled with the CPU and wall seconds of the block, and those that count.

    CPU time counts on a CPU with one thread, else wall time.
    """
    seconds: dict[str, float] = {}
    wait = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    wait()
    cpu, wall = time.process_time(), time.perf_counter()
    yield seconds
    wait()
    seconds.update(cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall)
    seconds["busy_s"] = max(seconds["cpu_s" if device.type == "cpu" else "wall_s"], 1e-9)


@torch.inference_mode()
def gemm_rate(model, repeats: int = 20) -> float:
    """Return the best operations per second of (128, H) @ (H, I), as in decoding 128 rows.

    The weights are tried as they are and prepacked (`igcore.engine.prepack`); the faster counts.
    """
    size, wide = model.config.hidden_size, model.config.intermediate_size
    like = {"device": model.device, "dtype": model.dtype}
    x, layer = torch.randn(128, size, **like), torch.nn.Linear(size, wide, bias=False, **like)
    times = []
    for copies in (nullcontext(), use_prepacked(layer)):
        with copies:
            used = viewed(layer).model
            for _ in range(repeats):
                with clocks(model.device) as seconds:
                    used(x)
                times.append(seconds["busy_s"])
    return 2 * 128 * size * wide / min(times)


def timed(
    work: Callable[[], list[str]], models: Sequence, device: torch.device, prompts: int
) -> dict:
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
    rate = gemm_rate(models[0])
    with Meter(models) as meter, clocks(device) as seconds:
        answers = work()
    assert len(answers) == prompts and all(isinstance(answer, str) for answer in answers)
    counts = {
        "forward_tokens": meter.tokens,
        "padding": meter.padding,
        "flops": meter.flops,
        "kv_bytes": meter.kv_bytes,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return seconds | counts | {"rate": rate, "device": name}


def line(case: Case, repeat: int, found: Mapping) -> dict:
    """Return a line of ``responses.jsonl``: case, repeat, time of day and what `timed` found."""
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    name = {"method": repr(case), "prompt_id": str(repeat), "measured": at}
    return name | asdict(case) | dict(found)


def table(lines: Sequence[dict], sections: Mapping[str, Sequence[Case]]) -> pd.DataFrame:
    """Return one row per planned case, with the columns `COLUMNS` and ``repr(case)`` as index.

    Numbers are medians over the repeats. ``measured`` says when the first repeat was written; it is
    `NOT_MEASURED` in a row without numbers.

    ``tokens_per_s`` counts sampled tokens (for ARGS, considered ones), n_samples * new_tokens of
    every prompt, by wall time. ``gemm_share`` is the useful work per second as a share of the best
    `gemm_rate` of its dtype and device. ``kv_bytes``, ``forward_tokens`` and ``padding`` are those
    of the whole run over all prompts, policy and scorers together.
    """
    found = pd.DataFrame(lines).astype(dict.fromkeys(["rate", "flops", *COUNTS], float))
    found["rate"] = found.groupby(["models", "dtype", "device"])["rate"].transform("max")
    groups = found.groupby("method")
    rows = groups.first()
    medians = groups.median(numeric_only=True)
    rows[medians.columns] = medians
    rows["repeats"] = groups.size()
    rows["cpu_s_per_prompt"] = rows["cpu_s"] / rows["prompts"]
    rows["wall_s_per_prompt"] = rows["wall_s"] / rows["prompts"]
    tokens = rows["prompts"] * rows["n_samples"] * rows["new_tokens"]
    rows["tokens_per_s"] = tokens / rows["wall_s"]
    rows["gemm_share"] = rows["flops"] / rows["busy_s"] / rows["rate"]
    cases = {repr(case): asdict(case) for cases in sections.values() for case in cases}
    planned = pd.DataFrame.from_dict(cases, orient="index")
    rows = rows.reindex(planned.index)
    rows[planned.columns] = planned
    rows = rows.fillna({"measured": NOT_MEASURED, "repeats": 0})
    rows[COUNTS] = rows[COUNTS].round()  # the median of two counts may lie between them
    return rows[COLUMNS].astype({"repeats": int} | dict.fromkeys(COUNTS, "Int64"))


def peaks(lines: Sequence[dict]) -> str:
    """Return the best `gemm_rate` of each dtype and device as text."""
    rates = pd.DataFrame(lines).astype({"rate": float}).groupby(["dtype", "device"])["rate"].max()
    return ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {dtype} on {device}"
        for (dtype, device), rate in rates.dropna().items()
    )
