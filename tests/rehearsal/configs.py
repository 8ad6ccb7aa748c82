"""The settings of the paper's models and scorers as their files have them, in small sizes."""

from pathlib import Path

import yaml

# of models, tokenizers and data sets
FORMATS = yaml.safe_load(
    (Path(__file__).parents[1] / "data/rehearsal.yaml").read_text(encoding="utf-8")
)
HIDDEN, LAYERS, HEADS = 32, 2, 4
# of QRM; the last is the width of its gate, 1024 in the real one
OBJECTIVES, QUANTILES, GATE = 19, 19, 16
END_OF_TURN = 128009

LLAMA2, LLAMA3, LABELS = FORMATS["llama2"], FORMATS["llama3"], FORMATS["labels"]
ARGS_REWARD = {key: value for key, value in LLAMA2.items() if key != "pad_token_id"}
ARGS_REWARD |= FORMATS["args_reward"]
QRM = FORMATS["qrm"] | {
    "id2label": {str(n): name for n, name in enumerate(LABELS)},
    "label2id": {name: n for n, name in enumerate(LABELS)},
}
