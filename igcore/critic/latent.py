"""What a critic reads of responses: o_t and h_t of every prefix, from one forward pass over the
whole. Knows models and ids only.

The paper's footnote: o_t is the last hidden state after the final norm, h_t the keys and values of
all layers at all positions so far. During a search the engine has them already
(`igcore.engine.local.LocalEngine.history`); for text that has been written they are made again here, and are
the same numbers up to rounding. Neither is stored: at 7B the two take megabytes a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..engine.device import GIB
from ..engine.kv_cache import History, pad_left
from ..engine.prepack import products_of
from ..errors import ParameterError, unknown_name
from ..progress import progress

ENCODE = 32  # responses encoded at a time where all are held in memory

# which parts of `Latents` a critic reads, by its features
FEATURES = {
    "o": ("hidden",),
    "h": ("keys", "values"),
    "ho": ("hidden", "keys", "values"),
    "m": ("middle",),
}


@dataclass
class Latents:
    """Hidden states of B responses, padded on the right to n tokens.

    Attributes
    ----------
    mask : Tensor (B, n) bool
        Where a token stands.
    hidden : Tensor (B, n, H) or None
        o_t: the hidden state after the final norm.
    middle : Tensor (B, n, H) or None
        What a middle layer puts out.
    keys, values : list of Tensor (B, heads, n, head_dim), or None
        h_t: one pair per layer, of every token since the prompt.
    """

    mask: torch.Tensor
    hidden: torch.Tensor | None = None
    middle: torch.Tensor | None = None
    keys: list[torch.Tensor] | None = None
    values: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, history: History) -> "Latents":
        """Take what the engine hands over: rows of one length."""
        mask = torch.ones(history.hidden.shape[:2], dtype=torch.bool, device=history.hidden.device)
        return cls(mask, history.hidden, history.middle, history.keys, history.values)

    def only(self, features: str) -> "Latents":
        """Return the parts that a critic with these features reads."""
        return Latents(self.mask, **{name: getattr(self, name) for name in FEATURES[features]})

    @classmethod
    def join(cls, parts: Sequence["Latents"]) -> "Latents":
        """Return the responses of all parts, padded to one length."""
        n = max(part.mask.shape[1] for part in parts)
        parts = [
            part._map(
                pad(part.mask, (0, n - part.mask.shape[1])),
                lambda x: pad(x, (0, 0, 0, n - x.shape[-2])),
            )
            for part in parts
        ]

        def cat(name: str):
            found = [getattr(part, name) for part in parts]
            if isinstance(found[0], list):
                return [torch.cat(layer) for layer in zip(*found, strict=True)]
            return None if found[0] is None else torch.cat(found)

        return cls(**{f.name: cat(f.name) for f in fields(cls)})

    def rows(self, index: torch.Tensor) -> "Latents":
        """Return some of the responses, without the columns that only padding fills."""
        mask = self.mask[index]
        n = int(mask.sum(1).max())
        return self._map(mask[:, :n], lambda x: x[index, ..., :n, :])

    def to(self, device, dtype: torch.dtype) -> "Latents":
        """Return the same on a device, numbers as `dtype`."""
        return self._map(self.mask.to(device), lambda x: x.to(device, dtype))

    def without_padding(self) -> "Latents":
        """Return the same with zeros where no token stands."""
        empty = ~self.mask[..., None]  # (B, n, 1)
        return self._map(
            self.mask, lambda x: x.masked_fill(empty if x.dim() == 3 else empty[:, None], 0)
        )

    def _map(self, mask: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> "Latents":
        """Return the same with another mask and every other tensor changed; their last two axes are
        positions and numbers.
        """
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "mask"}
        return Latents(
            mask,
            **{
                name: [change(x) for x in part]
                if isinstance(part, list)
                else None
                if part is None
                else change(part)
                for name, part in parts.items()
            },
        )


@torch.no_grad()  # not inference mode, whose tensors cannot be trained on
def latents(
    model,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    features: str = "ho",
    layer: int | None = None,
) -> Latents:
    """Encode B sequences at once and return what describes the prefixes of their responses.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only.
    prompts, responses : sequences of B sequences of int
        Token ids; prompts of at least one. An end token does not belong to a response: the engine
        never encodes it.
    features : str
        A key of `FEATURES`; parts that it does not name are None. For ``m`` the layers above
        `layer` are not run.
    layer : int, optional
        The middle layer of ``m``, counted from 0.

    Raises
    ------
    ParameterError
        For unknown features, a layer that the model does not have, responses that are all empty, or
        ``h`` and ``ho`` of a model that keeps keys and values of its last tokens only.
    """
    if features not in FEATURES:
        raise unknown_name("features", features, FEATURES)
    if not any(map(len, responses)):
        raise ParameterError(
            "all responses are empty, and an empty response has no prefix; give at least one token"
        )
    stop = middle_layer(model, layer) if features == "m" else None
    first = list(dict.fromkeys(map(tuple, prompts)))
    owner = torch.tensor([first.index(tuple(prompt)) for prompt in prompts], device=model.device)
    ids, mask = pad_left(first, model.device)
    at, n = ids.shape[1], max(map(len, responses))
    words = torch.tensor(
        [[*r, *[0] * (n - len(r))] for r in responses], device=model.device
    )  # (B, n)
    spoken = torch.arange(n, device=model.device) < torch.tensor(
        [[len(r)] for r in responses], device=model.device
    )  # (B, n)
    whole = torch.cat([mask[owner], spoken.to(mask)], dim=1)
    cache = DynamicCache(config=model.config)
    if all(
        type(x) is DynamicLayer for x in cache.layers
    ):  # a prompt is encoded once for all its responses
        _run(model, stop, ids, mask, cache)
        cache.batch_select_indices(owner)
        states = _run(model, stop, words, whole, cache)
    else:
        states = _run(model, stop, torch.cat([ids[owner], words], dim=1), whole, cache)[:, at:]
    if features == "m":
        return Latents(spoken, middle=states)
    layers = [x for x in cache.layers if getattr(x, "keys", None) is not None]
    if "h" in features and any(x.keys.shape[2] != whole.shape[1] for x in layers):
        raise ParameterError(
            f"features {features!r} need keys and values of every token, but "
            f"{type(model).__name__} keeps those of its last tokens "
            "only; choose features 'o' or 'm'"
        )
    keys, values = ([getattr(x, name)[:, :, at:] for x in layers] for name in ("keys", "values"))
    return Latents(spoken, states, None, keys, values).only(features)


class _Enough(Exception):
    """What was wanted is there; the rest of the model need not run."""


def _run(
    model, stop: torch.nn.Module | None, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Run a model on ids (B, S), up to the output of a module or else to the input of its head;
    return that, (B, S, H).

    `mask` (B, L) covers what the cache holds, too.
    """
    seen = []

    def note(states) -> None:
        seen.append(states[0] if isinstance(states, tuple) else states)
        raise _Enough

    if stop is None:
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, states: note(states)
        )
    else:
        hook = stop.register_forward_hook(lambda _, __, states: note(states))
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    try:
        with products_of(model):
            model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0,
            )
    except _Enough:
        pass
    finally:
        hook.remove()
    return seen[0]


def middle_layer(model, layer: int | None) -> torch.nn.Module:
    """Return a decoder layer by number.

    Raises
    ------
    ParameterError
        When the model has no such layer.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ParameterError(
            f"{type(model).__name__} does not name its layers; choose features other than 'm'"
        )
    if layer is None or not 0 <= layer < len(layers):
        raise ParameterError(f"layer is {layer}; features 'm' need one from 0 to {len(layers) - 1}")
    return layers[layer]


class Source:
    """Latents of N responses by number: held in memory when they take at most `memory_gb` GiB, else
    made again when asked for.

    Parameters
    ----------
    model, prompts, responses, features, layer
        See `latents`.
    """

    def __init__(
        self,
        model,
        prompts: Sequence,
        responses: Sequence,
        features: str,
        layer: int | None,
        memory_gb: float,
    ):
        self.model, self.prompts, self.responses, self.features, self.layer = (
            model,
            prompts,
            responses,
            features,
            layer,
        )
        self.held = None
        if (
            token_bytes(model, features) * len(responses) * max(map(len, responses))
            <= memory_gb * GIB
        ):
            bar = progress(len(responses), f"latents {features}")
            # so that little is padded, and a prompt rarely encoded twice
            order = sorted(
                range(len(responses)),
                key=lambda i: (len(prompts[i]), prompts[i], len(responses[i])),
            )
            parts = []
            for at in range(0, len(order), ENCODE):
                parts.append(self._encode(order[at : at + ENCODE]))
                bar.update(len(parts[-1].mask))
            bar.close()
            self.held, self.place = Latents.join(parts), torch.tensor(order).argsort()

    def take(self, index: Sequence[int]) -> Latents:
        if self.held is None:
            return self._encode(index)
        return self.held.rows(self.place[torch.as_tensor(index)].to(self.held.mask.device))

    def _encode(self, index: Sequence[int]) -> Latents:
        prompts, responses = ([part[i] for i in index] for part in (self.prompts, self.responses))
        return latents(self.model, prompts, responses, self.features, self.layer)


def shape_of(model) -> dict[str, int]:
    """Return the sizes on which a critic depends, from the latents of one token.

    Returns
    -------
    dict
        ``n_layers`` with attention, ``kv_width`` (keys and values of a token in one of them) and
        ``hidden``.
    """
    one = latents(model, [[0]], [[0]], "ho")
    widths = [
        k.shape[1] * k.shape[3] + v.shape[1] * v.shape[3]
        for k, v in zip(one.keys, one.values, strict=True)
    ]
    return {
        "n_layers": len(widths),
        "kv_width": max(widths, default=0),
        "hidden": one.hidden.shape[-1],
    }


def token_bytes(model, features: str) -> int:
    """Return the bytes that the latents of one token take."""
    shape = shape_of(model)
    one = shape["n_layers"] * shape["kv_width"] // 2
    numbers = {"hidden": shape["hidden"], "middle": shape["hidden"], "keys": one, "values": one}
    return sum(numbers[part] for part in FEATURES[features]) * model.dtype.itemsize
