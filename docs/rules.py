"""Measure the rules of `igcore.rules` on everyday questions: ``python -m docs.rules``.

It writes the table of docs/scorers.md: how often a plain model keeps each rule, and what a guard of
the same model does, with the same questions and seed. The rule's cost of the whole answer decides.
"""

import pandas as pd

import igcore as ig
from igstudy.files import replace_file, root

N = 20  # questions
# what a reader wants; the cost as a reader writes it; its budget
RULES = (
    ("no number that is not in the question", "without_new_numbers()", 0),
    ("no banned words or names", 'without_words(["best", "great", "important"])', 0),
    ("no list", r'without_pattern(r"(?m)^\s*[-*•\d]")', 0),
    ("no sentence of more than 20 words", "longest_sentence()", 20),
    ("at most 40 words", 'length("words")', 40),
)


def measured(policy: ig.Policy, questions: list[str]) -> pd.DataFrame:
    """Return a row for each rule: answers of the plain model and of the guard, as counts."""
    rows = []
    chats = [[{"role": "user", "content": question}] for question in questions]
    for wanted, code, budget in RULES:
        cost = eval(f"ig.rules.{code}")
        guard = ig.Guard(policy, cost, budget=budget, max_new_tokens=64)
        plain, guarded = list(ig.decode("base", guard, chats, seed=0)), guard.map(chats, seed=0)
        safe = sum(answer.status == "verified_safe" for answer in guarded)
        abstained = sum(answer.status == "abstained" for answer in guarded)
        rows.append(
            {
                "what you want": wanted,
                "cost": f"`{code}`",
                "budget": budget,
                "plain model: within": sum(answer.cost <= budget for answer in plain),
                "guard: within": safe,
                "over": len(guarded) - safe - abstained,
                "abstained": abstained,
                "tokens, plain": mean_tokens(plain),
                "tokens, guard": mean_tokens(guarded),
            }
        )
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def mean_tokens(answers: list[ig.Response]) -> int:
    """Return the sampled tokens of an answer, those of dropped blocks included."""
    return round(sum(answer.counts.policy_tokens for answer in answers) / len(answers))


def main() -> None:
    """Write figures/tables/rules.csv and rules.md."""
    base = root()
    questions = (base / "igstudy/data/everyday.txt").read_text(encoding="utf-8").splitlines()[:N]
    table = measured(ig.load_policy("smollm2-chat"), questions)
    folder = base / "figures/tables"
    replace_file(folder / "rules.csv", table.to_csv(index=False))
    replace_file(folder / "rules.md", table.to_markdown(index=False) + "\n")


if __name__ == "__main__":
    main()
