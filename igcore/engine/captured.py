"""A block of steps in which the host asks the device for nothing: for GPUs, which wait for Python.

Between two tokens the usual loop reads the tokens and decides which rows go on. That takes longer
than the step itself. Here all slots of a fixed slab go on until the block's end, tokens are drawn
on the device, and the host reads them once. Near ties are drawn again after that. On a GPU one step
is captured as a CUDA graph and replayed; elsewhere, as in tests, it runs operation by operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import Packing, Prompts, Slab, attention_of
from .block import Block
from .diversity import Penalty
from .kv_cache import forward
from .prefix_cache import SharedRows
from .sampling import WORDS, changes_of, check_finite, drawn

if TYPE_CHECKING:
    from .local import LocalEngine, Rows, Sampled

# tokens, log_p, log_q and near ties of R rows, `length` each
Columns = tuple[list[list[int]], list[list[float]], list[list[float]], list[list[bool]]]


class Slots(Packing):
    """Every slot of a slab, with one token a step, in tensors that a step moves on in place."""

    mask: Tensor

    def __init__(self, prompts: Prompts, slab: Slab, column: Tensor):
        self.prompts, self.slab = prompts, slab
        device, capacity = column.device, slab.hidden.shape[1]
        self.n_slots, self.n_steps, self.filled = len(column), 1, capacity
        self.slot = torch.arange(self.n_slots, device=device)
        self.step = torch.zeros_like(self.slot)
        self.column = column
        self.position = prompts.mask.sum(1)[self.slot // slab.width] + column
        self.columns = torch.arange(capacity, device=device)
        shape = len(prompts.ids), 1, slab.width, 1, 1, capacity
        prefix = prompts.mask[:, None, None, None, None].expand(*shape[:-1], -1)
        self.mask = torch.cat([prefix, prefix.new_zeros(shape)], dim=-1)
        self.look()

    def look(self) -> None:
        """Let each slot see its columns up to the one that it stands at."""
        seen = self.columns <= self.column[:, None]  # (C, capacity)
        self.mask[..., -self.filled :] = seen.view(self.mask[..., -self.filled :].shape)

    def advance(self) -> None:
        """Move every slot on by one column."""
        self.column += 1
        self.position += 1
        self.look()


def sample_captured(
    engine: "LocalEngine",
    rows: Sequence[int],
    keys: Sequence[Sequence[int]],
    penalties: Sequence[Penalty | None],
    last: bool,
) -> "Sampled":
    """Sample a block whose tokens are read once, and sample again what a near tie changes.

    See `LocalEngine.sample_block`; the penalties go by position alone.
    """
    state, u = engine.ready(rows, keys)
    assert isinstance(state, SharedRows)
    after, columns = captured_steps(state, u, penalties, last)
    block = Block.empty(0, len(rows))
    places: dict[int, tuple[Rows, int]] = {}
    parted = []  # candidates that go another way than the captured steps
    for c, row in enumerate(rows):
        penalty, steps = penalties[c], zip(*(values[c] for values in columns), strict=True)
        for t, (token, log_p, log_q, near) in enumerate(steps):
            sampled = token
            if near:
                factors = penalty.at(block.tokens[c]) if penalty else None
                token, log_p, log_q = engine.draw_alone(row, block.tokens[c], u[c, t], factors)
            block.append(c, token, log_p, log_q, near)
            block.ended[c] = token in engine.eos_ids
            if block.ended[c] or token != sampled:
                break
        if token != sampled and not block.ended[c]:
            parted.append(c)
        elif not (block.ended[c] or last):
            places[c] = after, c
    if parted:
        rest, found = engine.sample_steps(
            [rows[c] for c in parted],
            [keys[c] for c in parted],
            [penalties[c] for c in parted],
            last,
            [block.tokens[c] for c in parted],
        )
        for i, c in enumerate(parted):
            for t in range(len(block.tokens[c]), len(rest.tokens[i])):
                sample = rest.tokens[i][t], rest.log_p[i][t], rest.log_q[i][t], rest.near[i][t]
                block.append(c, *sample)
            block.ended[c] = rest.ended[i]
        places |= {c: found[i] for i, c in enumerate(parted) if i in found}
    for c, tokens in enumerate(block.tokens):
        unread = block.ended[c] or (last and len(tokens) == u.shape[1])
        block.encoded[c] = len(tokens) - unread
    return block, places


@torch.inference_mode()
def captured_steps(
    state: SharedRows, u: Tensor, penalties: Sequence[Penalty | None], last: bool
) -> tuple[SharedRows, Columns]:
    """Sample as many tokens for every row as `u` (R, length, WORDS) has numbers.

    Rows go on behind an end token; what follows it means nothing.

    Parameters
    ----------
    state : SharedRows
        With room for the tokens, which are written into its slab.
    penalties : sequence of R Penalty or None
        By position alone.
    last : bool
        Whether the model need not read the last tokens.

    Returns
    -------
    state : SharedRows
        After the block; without `last`, all rows have read their tokens.
    columns : lists of R lists
        Tokens, their logprobs under the reference and as sampled, and which were near ties.

    Raises
    ------
    PolicyError
        When a logit is not finite.
    """
    device, slab, slots = state.logits.device, state.slab, state.slots
    n, length = len(slab.hidden), u.shape[1]
    logits = state.logits.new_zeros(n, state.logits.shape[1])
    logits[slots] = state.logits
    hidden = slab.hidden.new_zeros(n, slab.hidden.shape[-1])
    numbers = torch.full((n, length, WORDS), 0.5, dtype=u.dtype, device=device)
    numbers[slots] = u.to(device)
    changes = _changes(penalties, slots, n, length, device)
    column = torch.zeros(n, dtype=torch.long, device=device)
    column[slots] = torch.tensor(state.lengths, device=device)
    packing = Slots(state.prompts, slab, column)
    at = torch.zeros(1, dtype=torch.long, device=device)  # the step, counted on the device
    found = torch.zeros(5, n, length, dtype=torch.float64, device=device)

    def draw() -> Tensor:
        """Draw a token for every slot and write down what was found."""
        change = None
        if changes:
            change = changes[0].index_select(0, at)[0], changes[1].index_select(0, at)[0]
        of_step = drawn(logits, numbers.index_select(1, at)[:, 0], change, blind=True)
        found.index_copy_(2, at, torch.stack([x.double() for x in of_step])[..., None])
        return of_step[0]

    def step() -> None:
        """Draw a token for every slot, and let the model read it."""
        tokens = draw()
        inputs = {"input_ids": tokens[None], "position_ids": packing.position[None]}
        with attention_of(state.model):
            after, following = forward(
                state.model, state.watch, past_key_values=packing, logits_to_keep=0, **inputs
            )
        slab.hidden[packing.slot, packing.column] = after[0]
        hidden.copy_(after[0])
        logits.copy_(following[0])
        packing.advance()
        at.add_(1)

    _repeat(step, length - last, device)
    if last:
        draw()
    tokens, log_p, log_q, near, mass = found[:, slots].cpu()  # the only wait
    check_finite(mass)
    lengths = [start + length - last for start in state.lengths]
    state = replace(state, lengths=lengths, hidden=hidden[slots], logits=logits[slots])
    columns = tokens.long().tolist(), log_p.tolist(), log_q.tolist(), near.bool().tolist()
    return state, columns


def _repeat(step: Callable[[], None], times: int, device: torch.device) -> None:
    """Take a step several times, on a GPU as a graph that is captured once."""
    eager = times if device.type != "cuda" or times < 3 else 1
    for _ in range(eager):  # on a GPU the first step also makes what a capture must not make
        step()
    if eager < times:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(times - eager):
            graph.replay()


def _changes(
    penalties: Sequence[Penalty | None],
    slots: Sequence[int],
    n: int,
    length: int,
    device: torch.device,
) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and factors of every step and slot, both (length, C, P), if any."""
    if not any(penalties):
        return None
    steps = []
    for t in range(length):
        pairs = zip(slots, penalties, strict=True)
        here = {slot: penalty.at([0] * t) for slot, penalty in pairs if penalty}
        steps.append(changes_of(here, n, device))
    width = max(tokens.shape[1] for tokens, _ in steps)
    # a short line repeats itself: the same numbers are then written twice
    columns = [torch.arange(width, device=device) % tokens.shape[1] for tokens, _ in steps]
    wide = [[part[:, c] for part in step] for step, c in zip(steps, columns, strict=True)]
    tokens, factors = (torch.stack(part) for part in zip(*wide, strict=True))
    return tokens, factors
