"""A panel for JupyterLab: a prompt, sliders, and the candidate trees of the chosen methods.

The budget slider judges the recorded candidates again immediately; every other control decodes.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from ..decoding import decode
from ..errors import IgcoreError, needs
from ..guard import Guard
from ..methods import READ, method_of
from .html import GREY, OVER, mask_answer
from .tree import Tree

# setting -> largest value of its slider, which is there if a chosen method reads it
SLIDERS = {"n_samples": 16, "keep": 8, "block_size": 32, "rounds": 4, "tries": 8, "choices": 4}


def explore(guard: Guard, prompt: str = "", methods: Sequence[str] = ()) -> Any:
    """Return a panel that shows a guard's search, as the last expression of a cell.

    Parameters
    ----------
    guard : Guard
    prompt : str
        Prompt to decode immediately; without one the panel waits for the user to enter one.
    methods : sequence of str
        Keys of `igcore.METHODS`, shown side by side; by default the guard's own and Best-of-N.

    Returns
    -------
    ipywidgets.VBox
        A notebook without a kernel shows a static picture instead.

    Raises
    ------
    ParameterError
        For an unknown method, or when ipywidgets is not installed.
    """
    chosen = list(methods) or list(dict.fromkeys([guard.method, "best-of-n"]))
    for name in chosen:
        guard.with_method(name)
    panel = Explorer(guard, prompt, chosen)
    if prompt:
        panel.decode()
    return panel.box


class Explorer:
    """The state behind the panel.

    Attributes
    ----------
    box : ipywidgets.VBox
        The panel.
    pages : dict of str to str
        The masked answers by method as HTML, for which the cost is asked once.
    trees : dict of str to Tree
        Their trees, under the budget of the decoding.
    """

    def __init__(self, guard: Guard, prompt: str, methods: Sequence[str]):
        self.widgets = widgets = needs("ipywidgets")
        self.guard, self.methods = guard, methods
        self.pages: dict[str, str] = {}
        self.trees: dict[str, Tree] = {}
        budget, wide = guard.config.budget, {"width": "460px", "max_width": "100%"}
        self.prompt = widgets.Textarea(prompt, description="prompt", rows=2, layout=wide)
        self.budget = widgets.FloatSlider(budget, min=0, max=max(2 * budget, 0.1))
        self.budget.step, self.budget.readout_format = self.budget.max / 200, ".3f"
        self.sliders = {}
        unread = READ - frozenset().union(*(method_of(name).reads for name in methods))
        for name, most in SLIDERS.items():
            if name in unread:
                continue
            value = getattr(guard.config, name)
            slider = widgets.IntSlider(value, min=1, max=max(most, value), continuous_update=False)
            self.sliders[name] = slider
        labelled = {"budget": self.budget} | self.sliders
        for name, slider in labelled.items():
            slider.description, slider.style.description_width = name, "100px"
        decode = widgets.Button(description="Decode", button_style="primary")
        self.controls = [decode, self.prompt, *labelled.values()]
        self.message, self.shown = widgets.HTML(), widgets.HBox()
        self.shown.layout.flex_flow = "row wrap"

        settings = widgets.VBox([self.prompt, *labelled.values()])
        self.box = widgets.VBox([settings, widgets.HBox([decode, self.message]), self.shown])
        # a notebook without a kernel shows the static picture of this output
        self.live = self.box._repr_mimebundle_
        self.box._repr_mimebundle_ = self.with_picture

        for slider in self.sliders.values():
            slider.observe(self.decode, names="value")
        self.budget.observe(self.judge, names="value")
        decode.on_click(self.decode)

    def decode(self, change: object = None) -> None:
        """Decode the prompt by every chosen method and show the trees; the controls wait."""
        for control in self.controls:
            control.disabled = True
        try:
            self.show_decoded()
        except IgcoreError as error:  # keep showing the previous answers
            self.show_message(str(error), OVER)
        finally:
            for control in self.controls:
                control.disabled = False

    def show_decoded(self) -> None:
        """Decode the prompt by every chosen method and show the answers with their trees."""
        answers = {}
        settings = {name: slider.value for name, slider in self.sliders.items()}
        config = replace(self.guard.config, budget=self.budget.value, **settings)
        guard = replace(self.guard, config=config)
        for name in self.methods:
            self.show_message(f"decoding by {name} ...")
            found = decode(name, guard, [self.prompt.value], seed=guard.seed, record=True)
            answers[name] = next(found)
        self.trees = {name: answer.tree() for name, answer in answers.items()}
        # the verdict is the tree's, which follows the budget slider
        self.pages = {name: f"<p>{escape(mask_answer(a))}</p>" for name, a in answers.items()}
        self.show(self.trees)
        self.show_message("decoded")

    def judge(self, change: object = None) -> None:
        """Show the recorded candidates under the budget of the slider."""
        self.show({name: tree.rejudge(self.budget.value) for name, tree in self.trees.items()})
        self.show_message("the recorded candidates, judged again; Decode samples under this budget")

    def show_message(self, sentence: str, color: str = GREY) -> None:
        """Show a sentence beside the buttons."""
        self.message.value = f'<span style="color:{color}">{escape(sentence)}</span>'

    def show(self, trees: dict[str, Tree]) -> None:
        """Show the decoded answers with these trees, which may have another budget."""
        half = {"flex": "1 1 0", "min_width": "280px"}
        self.shown.children = [
            self.widgets.HTML(self.pages[name] + tree._repr_svg_(), layout=half)
            for name, tree in trees.items()
        ]

    def with_picture(self, **more: Any) -> dict[str, Any]:
        """Return the panel's MIME bundle with the first tree as a picture."""
        pictures = [tree._repr_svg_() for tree in self.trees.values()]
        return {**self.live(**more), **({"image/svg+xml": pictures[0]} if pictures else {})}
