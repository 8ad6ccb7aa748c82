"""A panel for JupyterLab: a prompt, sliders, and the candidate trees of several methods.

The budget slider judges the recorded candidates again, at once. Every other control decodes again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..beams import METHODS, method_of
from ..decoding import decode
from ..errors import IgcoreError, ParameterError, needs
from ..folders import root
from ..models.policies import POLICIES
from ..models.registry import SCORERS
from .html import OVER, answer_html
from .tree import Tree

if TYPE_CHECKING:
    from ..guard import Guard

BESIDE = "best-of-n"  # stands beside the guard's own method unless others are chosen
SLIDERS = {  # setting -> its name on the panel, and the largest value that the slider offers
    "n_samples": ("N, samples per round", 16),
    "keep": ("K, beams kept", 8),
    "block_size": ("block, tokens", 32),
    "rounds": ("M, rounds", 4),
}


def explore(guard: Guard, prompt: str = "", methods: Sequence[str] = ()) -> Any:
    """Return a panel to watch a guard's search; the last expression of a cell shows it.

    Parameters
    ----------
    guard : Guard
    prompt : str
        Is answered at once; by default nothing is, until a prompt has been entered.
    methods : sequence of str
        Keys of `igcore.METHODS` that stand side by side; by default the guard's own and
        Best-of-N.

    Returns
    -------
    ipywidgets.VBox
        Where no kernel runs, a static picture stands in its place.

    Raises
    ------
    ParameterError
        For an unknown method, or when ipywidgets is not installed.
    """
    chosen = list(methods) or list(dict.fromkeys([guard.method, BESIDE]))
    for name in chosen:
        guard.under(name)
    panel = Explorer(guard, prompt, chosen)
    if prompt:
        panel.decode()
    return panel.box


class Explorer:
    """The state behind the panel.

    Attributes
    ----------
    box : ipywidgets.VBox
        What is shown.
    trees : dict of str to Tree
        By method, as they were decoded.
    """

    def __init__(self, guard: Guard, prompt: str, methods: Sequence[str]):
        self.guard, self.trees, self.answers = guard, {}, {}
        widgets = needs("ipywidgets", "notebooks")
        config, wide = guard.config, {"description_width": "150px"}
        self.prompt = widgets.Textarea(
            prompt, description="prompt", rows=2, layout={"width": "460px"}
        )
        usable = [name for name in METHODS if guard.critic or not method_of(name).network]
        self.methods = widgets.SelectMultiple(
            options=usable, value=list(methods), description="methods", rows=len(usable),
            layout={"width": "460px"},
        )  # fmt: skip
        highest = max(2 * config.budget, 0.1)
        self.budget = widgets.FloatSlider(
            config.budget, min=0, max=highest, step=highest / 200, readout_format=".3f",
            description="d, budget", style=wide,
        )  # fmt: skip
        self.sliders = {}
        for name, (label, most) in SLIDERS.items():
            value = getattr(config, name)
            self.sliders[name] = widgets.IntSlider(
                value, min=1, max=max(most, value), continuous_update=False, description=label,
                style=wide,
            )  # fmt: skip
        self.again = widgets.Button(description="Decode", button_style="primary")
        self.saving = widgets.Button(description="Save as params")
        self.bar = widgets.IntProgress(0, min=0, max=1, layout={"width": "160px"})
        self.message, self.shown = widgets.HTML(), widgets.HBox()
        self._html = widgets.HTML
        self._half = {"flex": "1 1 0", "min_width": "280px"}
        self.box = _with_picture(widgets.VBox, self)(
            [
                widgets.HBox(
                    [
                        widgets.VBox([self.prompt, self.methods]),
                        widgets.VBox([self.budget, *self.sliders.values()]),
                    ]
                ),
                widgets.HBox([self.again, self.saving, self.bar, self.message]),
                self.shown,
            ]
        )
        for widget in (self.methods, *self.sliders.values()):
            widget.observe(self._on_setting, names="value")
        self.budget.observe(self._on_budget, names="value")
        self.again.on_click(self._on_setting)
        self.saving.on_click(self._on_save)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the sliders."""
        values = {name: slider.value for name, slider in self.sliders.items()}
        return values | {"budget": self.budget.value}

    def decode(self) -> None:
        """Decode the prompt by every chosen method, and show the trees."""
        try:
            guard = replace(self.guard, config=replace(self.guard.config, **self.settings))
            began = time.perf_counter()
            config = guard.config
            blocks = -(-config.max_new_tokens // config.block_size)
            self.bar.max, self.bar.value = len(self.methods.value) * blocks, 0
            answered = {}
            for name in self.methods.value:
                answers = decode(
                    name, guard, [self.prompt.value], seed=guard.seed, on_block=self._on_block,
                    record=True,
                )  # fmt: skip
                answered[name] = next(answers)
            self.answers = answered
            self.trees = {name: answer.tree() for name, answer in self.answers.items()}
            self.bar.value = self.bar.max
            self._show(self.trees)
            self._say(f"decoded in {time.perf_counter() - began:.1f} s")
        except IgcoreError as error:  # what was shown before stays
            self._say(str(error), wrong=True)

    def judge(self, budget: float) -> dict[str, Tree]:
        """Return the recorded trees under another budget."""
        return {name: tree.under(budget) for name, tree in self.trees.items()}

    def _on_block(self, prompt: Any, beams: Any) -> None:
        self.bar.value += 1

    def _on_setting(self, change: Any) -> None:
        self.decode()

    def _on_budget(self, change: Any) -> None:
        self._show(self.judge(self.budget.value))
        self._say("the recorded candidates, judged again; Decode samples under this budget")

    def _on_save(self, button: Any) -> None:
        try:
            path = save_params(self.guard, self.prompt.value, self.methods.value, self.settings)
            self._say(f"papermill notebooks/30_decode.ipynb out.ipynb -f {path}")
        except IgcoreError as error:
            self._say(str(error), wrong=True)

    def _say(self, sentence: str, wrong: bool = False) -> None:
        color = OVER if wrong else "#444444"
        self.message.value = f'<span style="color:{color}">{escape(sentence)}</span>'

    def _show(self, trees: dict[str, Tree]) -> None:
        """Show the answers as they were decoded, and trees that may be judged otherwise."""
        self.shown.children = [
            self._html(answer_html(self.answers[name]) + tree._repr_svg_(), layout=self._half)
            for name, tree in trees.items()
        ]

    def picture(self) -> str:
        """Return the trees as HTML, for where no kernel runs."""
        return "".join(f"<div>{tree._repr_svg_()}</div>" for tree in self.trees.values())


def _with_picture(box: type, explorer: Explorer) -> type:
    """Return the class of a box that also shows itself as a static picture."""

    class Panel(box):  # type: ignore[valid-type,misc]
        def _repr_mimebundle_(self, **options: Any) -> Any:
            return {**super()._repr_mimebundle_(**options), "text/html": explorer.picture()}

    return Panel


def save_params(
    guard: Guard, prompt: str, methods: Sequence[str], settings: dict[str, Any]
) -> Path:
    """Write a prompt and settings as a params file for notebook 30, and return its path.

    Raises
    ------
    ParameterError
        When the policy or a scorer has no name that a params file could give.
    """
    named = {"policy": (guard.policy.name, POLICIES), "cost": (guard.cost.name, SCORERS)}
    if guard.reward is not None:
        named["reward"] = (guard.reward.name, SCORERS)
    for role, (name, table) in named.items():
        if name not in table:
            raise ParameterError(
                f"{role} {name!r} cannot be named in a params file; give Guard one of "
                f"{', '.join(table)}"
            )
    if guard.reward is None:
        raise ParameterError("notebook 30 needs a reward; give Guard reward=")
    folder = root() / "params" / "explored"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(folder.glob("*.yaml")))
    prompts = folder / f"{number}.txt"
    prompts.write_text(" ".join(prompt.split()) + "\n", encoding="utf-8")
    values = asdict(replace(guard.config, **settings))
    values |= {"profile": "explored", "run": f"decode-{number}", "seed": guard.seed}
    values |= {role: name for role, (name, _) in named.items()}
    values |= {"methods": list(methods), "prompts": str(prompts.relative_to(root()))}
    values |= {"split": "all", "limit": None, "hardest": 0}
    path = folder / f"{number}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path.relative_to(root())
