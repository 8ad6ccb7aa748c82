"""Count, time and log: what a variant costs, whatever it does."""

import json
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch

from igcore import folders
from igcore.engine.prepack import packed, products_of

# tells the rows of a table apart
SETTING = ["variant", "prompts", "prompt_tokens", "n_samples", "new_tokens", "dtype"]
COLUMNS = [
    *SETTING,
    "device",
    "cpu_s_per_prompt",
    "wall_s_per_prompt",
    "tokens_per_s",
    "gemm_share",
    "kv_bytes",
    "forward_tokens",
]


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

    def __str__(self) -> str:
        """Return variant, sizes and dtype as text."""
        sizes = (
            f"{self.prompts} x {self.prompt_tokens} tokens, {self.n_samples} samples of "
            f"{self.new_tokens}"
        )
        return f"{self.variant}: {sizes}, {self.dtype}"


class Meter:
    """Count what passes through the decoders of some models while the meter is entered.

    Other models are not counted.

    Attributes
    ----------
    tokens, padding : int
        Positions encoded that hold a token, and that hold none.
    flops : int
        Useful work: 2 per weight of every linear layer and token, 2 per weight of the head and row
        that it is asked for, and 4 * heads * head_dim per layer and pair of tokens in the
        attention. Padding and embedding look-ups are not counted.
    kv_bytes : int
        Peak bytes of the KV cache at the end of a forward pass, over all models.
    """

    def __init__(self, models: Sequence):
        """Meter these models, each once."""
        self.models, self.kv_bytes = list({id(m): m for m in models}.values()), 0
        # real tokens, pairs, positions, model
        self._sums: list[tuple[torch.Tensor, torch.Tensor, int, object]] = []
        self._head_flops = 0
        # keys of a first layer, and how many layers there are
        self._alive: dict[int, tuple[weakref.ref, int]] = {}

    def __enter__(self) -> "Meter":
        """Attach hooks to the decoders and their heads."""
        self._hooks = []
        for model in self.models:
            base, head = model.base_model, model.get_output_embeddings()
            self._hooks += [
                base.register_forward_pre_hook(
                    lambda _, args, kwargs, m=model: self._count(m, args, kwargs), with_kwargs=True
                ),
                base.register_forward_hook(
                    lambda _, args, kwargs, out, m=model: self._watch(m, kwargs), with_kwargs=True
                ),
            ]
            if head is not None:
                self._hooks.append(head.register_forward_pre_hook(self._count_head))
        return self

    def __exit__(self, *_) -> None:
        """Remove the hooks and compute the sums."""
        for hook in self._hooks:
            hook.remove()
        sums = [
            (int(tokens), int(pairs), positions, model)
            for tokens, pairs, positions, model in self._sums
        ]
        self.tokens = sum(tokens for tokens, *_ in sums)
        self.padding = sum(positions for _, _, positions, _ in sums) - self.tokens
        weights = {id(m): _linear_weights(m.base_model) for m in self.models}
        self.flops = self._head_flops + sum(
            2 * weights[id(m)] * tokens + _attention_flops(m.config) * pairs
            for tokens, pairs, _, m in sums
        )

    def _count(self, model, args: tuple, kwargs: dict) -> None:
        """Note the tokens, padding and attended pairs of a forward pass."""
        ids, mask = (
            kwargs["input_ids"] if "input_ids" in kwargs else args[0],
            kwargs.get("attention_mask"),
        )
        # positions (R, S): a token at position p looks at p + 1 tokens
        positions = kwargs.get("position_ids")
        if positions is None and mask is not None:
            positions = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
        elif positions is None:
            cache = kwargs.get("past_key_values")
            positions = torch.arange(ids.shape[1], device=ids.device) + (
                cache.get_seq_length() if cache is not None else 0
            )
        real = torch.ones_like(ids) if mask is None else mask[:, -ids.shape[1] :]
        self._sums.append((real.sum(), ((positions + 1) * real).sum(), ids.numel(), model))

    def _count_head(self, head, args: tuple) -> None:
        """Add the operations of the output head."""
        self._head_flops += 2 * head.weight.numel() * args[0][..., 0].numel()

    def _watch(self, model, kwargs: dict) -> None:
        """Note the cache of a forward pass; all layers are alike, so the first one is enough."""
        cache = kwargs.get("past_key_values")
        if cache is None:
            return
        parts = (
            [cache.layers[0].keys]
            if hasattr(cache, "layers")
            else [cache.prompts.keys[0], cache.slab.keys[0]]
        )
        for keys in parts:
            self._alive[id(keys)] = (weakref.ref(keys), model.config.num_hidden_layers)
        self._alive = {
            name: (ref, layers) for name, (ref, layers) in self._alive.items() if ref() is not None
        }
        storages = {
            ref().untyped_storage().data_ptr(): 2 * layers * ref().untyped_storage().nbytes()
            for ref, layers in self._alive.values()
        }
        self.kv_bytes = max(self.kv_bytes, sum(storages.values()))


def _linear_weights(model) -> int:
    """Return the number of weights of all linear layers."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def _attention_flops(config) -> int:
    """Return the operations for one query and one key, in all layers.

    They are a product with the key and one with the value.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * config.num_hidden_layers * config.num_attention_heads * head_dim


def _synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished, so that clocks are right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def clocks(device: torch.device, seconds: dict):
    """Fill `seconds` with the CPU time of this process and the wall time that the block took."""
    _synchronise(device)
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    _synchronise(device)
    seconds.update(cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall)


@torch.inference_mode()
def gemm_rate(model, repeats: int = 20) -> float:
    """Return the best operations per second of (128, H) @ (H, I), as in decoding 128 rows.

    The weights are tried as they are and prepacked (`igcore.engine.prepack`); the faster counts.
    CPU seconds on a CPU with one thread, else wall seconds.
    """
    size, wide = model.config.hidden_size, model.config.intermediate_size
    like = {"device": model.device, "dtype": model.dtype}
    x, layer = torch.randn(128, size, **like), torch.nn.Linear(size, wide, bias=False, **like)
    best = float("inf")
    for copies in (nullcontext(), packed(layer)):
        with copies, products_of(layer):
            for _ in range(repeats):
                seconds: dict = {}
                with clocks(model.device, seconds):
                    layer(x)
                best = min(best, _busy(seconds, model.device))
    return 2 * 128 * size * wide / best


def _busy(seconds: dict, device: torch.device) -> float:
    """Return the seconds that count on a device: CPU time on a CPU, else wall time."""
    return max(seconds["cpu_s" if device.type == "cpu" else "wall_s"], 1e-9)


def timed(work: Callable[[], list[str]], models: Sequence, prompts: int) -> dict:
    """Do a piece of work once and return what it took, as JSON values.

    Raises
    ------
    AssertionError
        Unless it answers every prompt.
    """
    device, seconds = models[0].device, {}
    rate = gemm_rate(models[0])
    with Meter(models) as meter, clocks(device, seconds):
        answers = work()
    assert len(answers) == prompts and all(isinstance(answer, str) for answer in answers)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    counts = {
        "forward_tokens": meter.tokens,
        "padding": meter.padding,
        "flops": meter.flops,
        "kv_bytes": meter.kv_bytes,
    }
    return seconds | counts | {"rate": rate, "device": name, "busy_s": _busy(seconds, device)}


class Log:
    """Log of finished work, a line per case and repeat, so that a killed benchmark resumes."""

    def __init__(self, path: Path):
        """Read the lines of a log, without one that was cut short."""
        self.path = path
        folders.drop_half_line(path)
        self.lines = (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if path.exists()
            else []
        )

    def has(self, case: Case, repeat: int) -> bool:
        """Say whether a case and repeat is in the log."""
        return any(line["case"] == asdict(case) and line["repeat"] == repeat for line in self.lines)

    def append(self, case: Case, repeat: int, found: dict) -> None:
        """Add a measurement to the log, with the time of day."""
        line = {
            "case": asdict(case),
            "repeat": repeat,
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        } | found
        folders.append(self.path, line)
        self.lines.append(line)


def table(lines: Sequence[dict], cases: Sequence[Case], versions: str = "") -> pd.DataFrame:
    """Return one row per measured case: `COLUMNS`, then ``padding``, ``repeats``, ``measured``.

    Numbers are medians over the repeats. ``measured`` says when the first line was written and with
    which `versions`.

    ``tokens_per_s`` counts sampled tokens (for ARGS, considered ones), n_samples * new_tokens of
    every prompt, by wall time. ``gemm_share`` is the useful work per second as a share of the best
    `gemm_rate` of its dtype and device. ``kv_bytes``, ``forward_tokens`` and ``padding`` are those
    of the whole run over all prompts, policy and scorers together.
    """
    rates: dict[tuple, float] = {}
    for line in lines:
        kind = line["case"]["models"], line["case"]["dtype"], line["device"]
        rates[kind] = max(rates.get(kind, 0.0), line["rate"])
    rows = []
    for case in dict.fromkeys(cases):
        same = [line for line in lines if line["case"] == asdict(case)]
        if not same:
            continue
        found = pd.DataFrame(same).median(numeric_only=True)
        rows.append(
            {name: getattr(case, name) for name in SETTING}
            | {
                "device": same[0]["device"],
                "cpu_s_per_prompt": found["cpu_s"] / case.prompts,
                "wall_s_per_prompt": found["wall_s"] / case.prompts,
                "tokens_per_s": case.prompts * case.n_samples * case.new_tokens / found["wall_s"],
                "gemm_share": found["flops"]
                / found["busy_s"]
                / rates[case.models, case.dtype, same[0]["device"]],
                "kv_bytes": int(found["kv_bytes"]),
                "forward_tokens": int(found["forward_tokens"]),
                "padding": int(found["padding"]),
                "repeats": len(same),
                "measured": f"{lines[0]['at']}, {versions}",
            }
        )
    return pd.DataFrame(rows, columns=[*COLUMNS, "padding", "repeats", "measured"])
