"""Tests of the heads for the cost of harm that also learn from harmful requests."""

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from igcore.models.head import HARM_2, Probe, load_head
from igcore.prompt import as_prompt
from igstudy import harm, heads
from igstudy.heads import Reading, Recipe
from igstudy.runs import heads_run

PROMPT = Reading(17, prompt=True)


def test_an_instruction_becomes_a_question():
    """Guards the form of half of the requests: XSTest and WSR ask, AdvBench orders."""
    assert heads.as_question("Write a guide on how to bake") == "How do I bake?"
    assert heads.as_question("Develop an oven") == "How can I develop an oven?"


def test_refusals_are_known_by_their_phrases():
    """Guards the rows: a refusal of a harmful request must not teach that it is harm."""
    assert heads.refuses("I’m sorry, no.") and heads.refuses("AS AN AI, I wait.")
    assert not heads.refuses("Of course, here it is.")


class Sampled:
    """A policy's answer to a prompt, as `igstudy.plain.plain_answers` yields them."""

    def __init__(self, prompt):
        self.prompt_id, self.prompt, self.text = prompt.id, prompt.text, f"to {prompt.text}"


def test_each_answer_is_sampled_once(tmp_path, monkeypatch):
    """Bug: a small example leaves its answers, and the whole run takes them for all."""
    asked = []

    def answers(guard, prompts):
        asked.append([prompt.text for prompt in prompts])
        return map(Sampled, prompts)

    monkeypatch.setattr(heads, "root", lambda: tmp_path)
    monkeypatch.setattr(heads, "plain_guard", lambda *_, **options: None)
    monkeypatch.setattr(heads, "plain_answers", answers)
    a, b, c = (as_prompt(text, "set") for text in "abc")
    heads.answers_of("p", "set", [b])
    heads.answers_of("p", "set", [a, b, c])
    found = heads.answers_of("p", "set", [c, b])
    assert asked == [["b"], ["a", "c"]]
    assert found["answer"].tolist() == ["to c", "to b"]
    assert {*found["kind"]} == {"p"} and list(found) == "kind set prompt_id prompt answer".split()


def test_the_states_of_several_layers_are_those_of_each_alone(tmp_path):
    """Guards one pass for several layers: a head must be used on the layer that trained it."""
    rows = pd.DataFrame(
        {"prompt": ["How do plants grow?"], "answer": ["They need light and water."]}
    )
    head = tmp_path / "head.safetensors"
    save_file({"weight": np.ones(576, np.float32), "bias": np.zeros(1, np.float32)}, head)
    readings = [Reading(15, prompt=True), PROMPT, Reading(15, prompt=False)]
    found = heads.states_of(rows, readings)
    for reading in readings:
        alone = Probe(
            repo="smollm2",
            layer=reading.layer,
            head=str(head),
            dtype="float32",
            text_format="human-assistant" if reading.prompt else "raw",
            self_check=False,
        )
        seen = rows if reading.prompt else rows.assign(prompt="")
        expected = harm.states_of(alone.load(), seen, harm.LENGTH)
        np.testing.assert_array_equal(found[reading][0], expected[0])


def test_the_cost_of_harm_is_a_frozen_head():
    """Guards what ships: the head that the card measures, under another name."""
    frozen = heads_run.frozen()
    assert len(frozen) == heads_run.KEPT
    head = frozen[heads_run.SHIPPED]
    weight, bias, about = load_head(HARM_2, len(head.weight))
    assert (weight.tolist(), bias.tolist()) == (head.weight.tolist(), [head.bias])
    assert about["layer"] == str(heads_run.SHIPPED.reading.layer)


# --- choosing -------------------------------------------------------------------------------------


def test_the_chosen_are_the_best_of_each_reading_and_then_the_best():
    """Worked out by hand. Guards the rule by which heads were frozen."""
    table = pd.DataFrame(
        [
            *((17, True, auroc, 0.9, 0.0) for auroc in (0.8, 0.7)),
            (21, True, 0.9, 0.9, 0.2),  # too many harmless ones over the budget
            *((21, True, auroc, 0.9, 0.1) for auroc in (0.6, 0.5)),
            *((reading, False, 0.85, 0.9, 0.0) for reading in (17, 21)),
        ],
        columns=["layer", "prompt", "auroc", "questions", "matters_over"],
    )
    assert heads_run.chosen(table).index.tolist() == [5, 6, 0, 3, 1]


@pytest.fixture
def rows_and_states():
    """Rows of all kinds in 40 groups, with states (3, 4) in which harm is a shift."""
    rng = np.random.default_rng(0)
    kinds = ["harmful", "unharmful", "requested", "requested", "matters", "policy", "policy"]
    rows = pd.DataFrame(
        {
            "kind": kinds * 40,
            "set": [*["labels", "advbench"] * 2, "matters", "harmless", "harmless"] * 40,
            "split": [*["train"] * 6, "test"] * 40,
            "group": [f"group {i // 7}" for i in range(280)],
            "prompt": [f"prompt {i}" + "?" * (i % 2) for i in range(280)],
        }
    )
    shift = 2.0 * rows["kind"].isin(["harmful", "requested"]).to_numpy()
    return rows, [rng.normal(size=(3, 4)) + up for up in shift]


def test_a_recipe_is_measured_by_folds(rows_and_states):
    """Compares with costs by folds that are counted here one by one."""
    rows, states = rows_and_states
    recipe = Recipe(PROMPT, 0.5, 2.0)
    found = heads_run.by_folds(rows, states, recipe)
    costs = harm.out_of_fold(rows, states, recipe.weights)
    last, highest = [cost[-1] for cost in costs], [max(cost) for cost in costs]
    kinds = rows["kind"]
    at = {name: [i for i, kind in enumerate(kinds) if kind == name] for name in set(kinds)}
    budget = np.median([highest[i] for i in at["harmful"]])
    assert found["budget"] == budget
    assert found["matters_over"] == np.mean([highest[i] > budget for i in at["matters"]])
    test = [i for i in at["policy"] if rows["split"][i] == "test"]
    assert found["harmless_over"] == np.mean([highest[i] > budget for i in test])
    won = [last[i] > last[j] for i in at["harmful"] for j in at["unharmful"]]
    assert found["auroc"] == pytest.approx(np.mean(won))
    asked = [i for i in at["requested"] if rows["prompt"][i].endswith("?")]
    won = [last[i] > last[j] for i in asked for j in at["matters"]]
    assert found["questions"] == pytest.approx(np.mean(won))


def test_the_weights_of_a_recipe_reach_its_head(rows_and_states):
    """Guards the weights: a feature that only answers to requests have counts more with them."""
    rows, states = rows_and_states
    kinds = rows["kind"]
    for kind, sign in (("requested", 1), ("matters", -1)):
        pairs = zip(states, kinds, strict=True)
        only = [np.append(x, np.full((3, 1), other == kind), 1) for x, other in pairs]
        recipes = [Recipe(PROMPT, w, w) for w in (0.3, 1.0, 3.0)]
        pull = [sign * harm.fit(rows, only, recipe.weights).weight[-1] for recipe in recipes]
        assert 0 < pull[0] < pull[1] < pull[2]


def test_heads_are_measured_on_labels_by_hand_and_on_twins(tmp_path, monkeypatch):
    """Worked out by hand. Guards which answers have a label, and the budget of the folds."""
    monkeypatch.setattr(heads_run, "BY_HAND", tmp_path / "labels.csv")
    (tmp_path / "labels.csv").write_text("digest,harmful\na,1\nb,0\nc,1\nd,0\n")
    answers = pd.DataFrame(
        {
            "digest": [*"abcdef"],
            "set": ["wsr-harmful"] * 3 + ["twins"] * 3,
            "prompt": [*"pqrstu"],
        }
    )
    # the costs 2, 0, -1, 1 of a to d at the end: a beats b and d, c beats neither
    states = [np.array([[9.0], [x]]) for x in (2, 0, -1, 1, 1, 0)]
    states[5] = np.array([[-1.0], [0.0]])  # below the budget at every word
    monkeypatch.setattr(heads_run, "states_of", lambda rows, readings: {PROMPT: states})
    recipe = Recipe(PROMPT, 1.0, 1.0)
    columns = ["auroc", "auroc_low", "auroc_high", "budget"]
    folds = pd.DataFrame([[0.8, 0.7, 0.9, 0.6]], [recipe.name], columns)
    table = heads_run.measured({recipe: harm.Head(np.ones(1), 0.0)}, answers, folds)
    assert table.loc[recipe.name, "by_hand"] == 0.5
    assert table.loc[recipe.name, "twins_over"] == pytest.approx(2 / 3)
    assert table.loc[recipe.name, "auroc"] == 0.8


def test_labels_by_hand_are_of_the_first_answers_by_digest():
    """Guards the choice of what is labelled: it must not depend on the texts or on their order."""
    answers = pd.DataFrame(
        [
            {"set": name, "kind": kind, "digest": f"{number * 7919 % 100:02}{kind}{name}"}
            for name in ("twins", "wsr-harmful")
            for kind in ("a", "b")
            for number in range(60)
        ]
    )
    chosen = heads_run.to_label(answers)
    assert len(chosen) == 100
    same = heads_run.to_label(answers.sample(frac=1, random_state=1))
    assert chosen["digest"].tolist() == same["digest"].tolist()
    part = answers[(answers["set"] == "twins") & (answers["kind"] == "b")]
    assert sorted(part["digest"])[:15] == [d for d in chosen["digest"] if d.endswith("btwins")]
