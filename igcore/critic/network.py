"""The critic: a network that predicts from the policy's hidden states how a response will end.

It has two heads (paper, section 5.2): f1, the probability that a response continued by the
reference policy ends within budget, and f2, its expected task cost gamma^T c_task. It judges all
prefixes of a response at once, and is causal: a prefix never sees the tokens after it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from ..config import SearchConfig
from ..engine.kv_cache import History
from ..errors import ParameterError
from ..policy import Policy
from ..scorers import Scorer
from ..settings import Number, settings
from .files import Network, Origin, load_network
from .latent import Latents, latents, shape_of

HEAD = 64  # numbers per attention head


@runtime_checkable
class Judge(Protocol):
    """A critic, which judges unfinished candidates; `Critic` is that of the paper.

    Attributes
    ----------
    watch : int or None
        The decoder layer whose output the engine must keep for it.
    reads_keys : bool
        Whether it reads the KV cache of the engine.
    """

    watch: int | None
    reads_keys: bool

    def judge(self, states: History, z: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return f1 and f2 (R,) of R candidates, given their scaled remaining budgets."""


@runtime_checkable
class Steers(Protocol):
    """A value network, which moves the hidden state of every token, as RE-Control does."""

    @property
    def steering(self) -> Callable[..., Callable[[Tensor, Tensor], Tensor]]:
        """(model, config) -> a function of o_t (R, H) and W o_t (R, V): the logits (R, V)."""


@settings(kw_only=True)
class Spec(Origin):
    """The specification of a critic; names, hashes and sizes are inherited.

    Attributes
    ----------
    accounting, checks, gamma_safety
        How costs use up the budget, see `igcore.SearchConfig`.
    budget, budget_high : float
        Lowest and highest budget of its training.
    gamma_task : float
        Discount of the task cost.
    features : str
        One of `igcore.critic.latent.FEATURES`.
    layer : int or None
        The middle layer of features ``m``.
    use_z : bool
        Whether z_t is an input.
    n_layers, kv_width : int
        The policy's number of layers, and the size of the KV cache of one token in one layer.
    """

    KIND: ClassVar = "critic"
    SAME: ClassVar = (*Origin.SAME, "accounting", "checks", "gamma_safety", "gamma_task")

    accounting: str
    checks: str
    gamma_safety: Number
    budget: Number
    budget_high: Number
    gamma_task: Number
    features: str
    layer: int | None
    use_z: bool
    n_layers: int
    kv_width: int

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        """Raise ``ParameterError`` unless it was trained for these settings and this budget."""
        super().check_settings(method, settings)
        # f1 is the probability to end within the budget of its training: for another one the number
        # would look as trustworthy, and mean something else
        if not self.budget <= settings.budget <= self.budget_high:
            raise ParameterError(
                f"budget is {settings.budget}, but the critic was trained for budgets from "
                f"{self.budget} to {self.budget_high}; choose one of these, or train a critic for "
                "this one"
            )


class Attention(nn.Module):
    """Multi-head attention of x (..., q, width) over a memory (..., k, memory_width).

    The caller adds the residual.
    """

    def __init__(self, width: int, memory_width: int, inner: int):
        super().__init__()
        # heads of 64 numbers; a layer narrower than that is one head, and any other width is
        # rounded down to whole heads
        self.heads = max(1, inner // HEAD)
        inner = self.heads * min(inner, HEAD)
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(memory_width, inner, bias=False)
        self.value = nn.Linear(memory_width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def mix(self, x: Tensor, memory: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return (..., q, inner), before the last projection; `seen` is as in `forward`."""
        # (..., heads, q or k, d)
        q = self.by_head(self.query(x))
        k = self.by_head(self.key(memory))
        v = self.by_head(self.value(memory))
        mixed: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return mixed.transpose(-2, -3).flatten(-2)

    def by_head(self, x: Tensor) -> Tensor:
        """Return (..., heads, n, d) of x (..., n, heads * d)."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-2, -3)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Return (..., q, width); `seen` (..., 1, q, k) is True where a query sees a memory."""
        out: Tensor = self.out(self.mix(x, memory, seen))
        return out


class GatedMLP(nn.Module):
    """The feed-forward part of a Llama layer, 11008 wide at width 4096."""

    def __init__(self, width: int):
        super().__init__()
        inner = width * 43 // 16  # Llama's ratio, 11008 / 4096
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., width) of x (..., width)."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """Attention over positions and a gated MLP, both with pre-norm and residual."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = Attention(width, width, width)
        self.mlp = GatedMLP(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))  # of x, memory, and MLP

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Return (B, n, width) of x (B, n, width), memory (B, k, width), seen (B, 1, n, k)."""
        x = x + self.attention(self.norms[0](x), self.norms[1](memory), seen)
        change: Tensor = self.mlp(self.norms[2](x))
        return x + change


class Last(nn.Module):
    """Features ``o``: o_t of the prefix's last token."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.size = spec.hidden
        self.norm = nn.LayerNorm(spec.hidden)

    def forward(self, x: Latents) -> Tensor:
        """Return the normed o_t, (B, n, H)."""
        normed: Tensor = self.norm(x.hidden)
        return normed


class Running(nn.Module):
    """Features ``m``: running mean and maximum of a middle layer, mapped token by token."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.norm = nn.LayerNorm(spec.hidden)
        self.token = nn.Linear(spec.hidden, spec.width)
        self.size = 2 * spec.width

    def forward(self, x: Latents) -> Tensor:
        """Return the running mean and maximum, (B, n, 2 width)."""
        tokens = gelu(self.token(self.norm(x.middle)))  # (B, n, width)
        # both are causal: entry t is over tokens 0..t, so one pass judges every prefix. Padding is
        # on the right, and so behind all tokens
        count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        mean = tokens.cumsum(1) / count[:, None]
        # in the mean one word counts less and less; the maximum still shows it
        return torch.cat([mean, tokens.cummax(1).values], dim=-1)


class States(nn.Module):
    """Attention over the KV cache, across layers, then positions; prompt tokens come first.

    The queries over positions come from o_t where it is read, else from the KV cache itself.
    """

    def __init__(self, spec: Spec):
        super().__init__()
        self.norm = nn.LayerNorm(spec.kv_width)
        self.over_layers = Attention(spec.kv_width, spec.kv_width, 2 * spec.width)
        # the paper's downscaling; at width 4096 this shape has about the paper's 0.7B weights
        self.down = nn.Linear(spec.kv_width, spec.width, bias=False)
        self.reads_o = "o" in spec.features
        if self.reads_o:
            self.question = nn.Sequential(
                nn.LayerNorm(spec.hidden), nn.Linear(spec.hidden, spec.width, bias=False)
            )
            self.over_questions = Layer(spec.width)
        self.over_positions, self.size = Layer(spec.width), spec.width

    def forward(self, x: Latents) -> Tensor:
        """Return one vector per prefix, (B, n, width)."""
        n = x.mask.shape[1]
        # 1. attention over the layers of each token, and the mean over layers
        kv = torch.cat([x.prompt, x.kv], dim=1)  # (B, L + n, layers, kv_width)
        normed = self.norm(kv)
        # the mean over layers commutes with the linear map, and is cheaper before it
        mixed = self.over_layers.mix(normed, normed).mean(2)
        memory = self.down(kv.mean(2) + self.over_layers.out(mixed))  # (B, L + n, width)
        # 2. causal mask: a token sees its whole prompt, itself and the tokens before it. It always
        # sees itself, so no row of the softmax is empty, which would give NaN
        past = torch.ones(n, n, dtype=torch.bool, device=kv.device).tril().expand(len(kv), 1, n, n)
        prompt = x.prompt_mask[:, None, None].expand(-1, 1, n, -1)  # (B, 1, n, L)
        # 3. one query per token of the response: from o_t, or else from its own keys and values
        queries = memory[:, -n:]
        if self.reads_o:
            asked = self.question(x.hidden)
            queries = self.over_questions(asked, asked, past)
        # 4. attention over positions, with the prompt first, as in `kv`
        out: Tensor = self.over_positions(queries, memory, torch.cat([prompt, past], dim=-1))
        return out


# features -> the module that maps latents to one vector per prefix, (B, n, size)
POOLS: dict[str, type[Last | Running | States]] = {
    "o": Last,
    "m": Running,
    **dict.fromkeys(["h", "ho", "xh", "xho"], States),
}


class Critic(Network):
    """The two-headed network.

    Attributes
    ----------
    centre, scale : Tensor (2,)
        The units of z and of f2.
    watch : int or None
        The decoder layer whose output the engine must keep for the critic.
    reads_keys : bool
        Whether it reads the KV cache of the engine.
    """

    SPEC = Spec
    spec: Spec

    def __init__(self, spec: Spec, dropout: float = 0.0):
        super().__init__(spec)
        self.pool = POOLS[spec.features](spec)
        self.trunk = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(self.pool.size + spec.use_z, spec.width),  # use_z is 1 or 0: one more input
            nn.GELU(),
            nn.Dropout(dropout),
        )
        self.heads = nn.Linear(spec.width, 2)  # logit of f1, and f2 in its units
        # None spares the hook and the memory of a second hidden state per token
        self.watch = spec.layer if spec.features == "m" else None
        self.reads_keys = "h" in spec.features

    def forward(self, x: Latents, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return f1 (as its logit) and f2 of every prefix (paper, section 5.2; appendix D.5).

        Parameters
        ----------
        x : Latents
            Of B responses padded to n tokens.
        z : Tensor (B, n)
            Scaled remaining budget after each token.

        Returns
        -------
        logit, f2 : Tensors (B, n)
            logit of f1; f2 = expected gamma_task^T c_task, higher is worse. Meaningless where the
            mask is False.
        """
        pooled = self.pool(x)  # (B, n, size)
        if self.spec.use_z:
            # z is in units of the cost model: unscaled it could swamp the features or be lost
            z = (z - self.centre[0]) / self.scale[0]
            pooled = torch.cat([pooled, z.to(pooled)[..., None]], dim=-1)
        logit, f2 = self.heads(self.trunk(pooled)).unbind(-1)
        # the logit and not f1: cross-entropy from a probability loses digits near 0 and 1
        return logit, f2 * self.scale[1] + self.centre[1]

    @torch.inference_mode()
    def judge(self, states: History, z: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Judge the last prefix of each of R rows, in float32 on the critic's device.

        Parameters
        ----------
        states : History
            Those of the engine, or of finished text, see `igcore.critic.latent`.
        z : sequence of R float
            Scaled remaining budget now.

        Returns
        -------
        f1, f2 : Tensors (R,)
            Probability of ending within budget, and expected gamma_task^T c_task. NaN for a row
            without a token and where the latents are NaN; a search must fail closed on NaN.
        """
        # float32, as in training; the policy may be in bfloat16
        x = latents(states, self.spec.features).to(self.centre.device, torch.float32)
        budgets = torch.as_tensor(z, dtype=torch.float32, device=self.centre.device)
        # z of now at every position: only the last position is used, and each sees its own z alone
        logit, f2 = self(x, budgets[:, None].expand(x.mask.shape))  # (R, n) each
        n = x.mask.sum(1)  # tokens of each row
        row = torch.arange(len(n), device=n.device)
        # clamp: an empty row would read column -1, the last one, which is padding
        end = (n - 1).clamp(min=0)
        empty = n == 0
        f1 = logit[row, end].masked_fill(empty, torch.nan).sigmoid()
        return f1, f2[row, end].masked_fill(empty, torch.nan)


def load_critic(
    folder: Path | str, *, policy: Policy, cost: Scorer, reward: Scorer | None = None
) -> Critic:
    """Load a critic for the policy and scorers that it was trained for.

    Parameters
    ----------
    reward : Scorer, optional
        Checked if given; f2 is in its units.

    Returns
    -------
    Critic
        In evaluation mode, float32, on the policy's device.

    Raises
    ------
    ParameterError
        When it was trained for another policy, scorer or model size; the sentence names both.
    RunError
        When files are missing, damaged or do not belong together.
    """
    return load_network(
        Critic, Path(folder), "critic", shape_of(policy.model), policy, cost, reward
    )
