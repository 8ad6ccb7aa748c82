"""The settings of the paper's models and scorers as their files have them, in small sizes."""

from tests.rehearsal.tokenizers import LLAMA3_SIZE, PIECES

HIDDEN, LAYERS, HEADS = 32, 2, 4
SIZE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
# of QRM; the last is the width of its gate, 1024 in the real one
OBJECTIVES, QUANTILES, GATE = 19, 19, 16
NORM = ("weight", "bias", "running_mean", "running_var")  # of a BatchNorm1d
END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN = 128001, 128008, 128009

LLAMA2 = SIZE | {  # config.json as it was written in 2023: no rope_theta, and torch_dtype
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_key_value_heads": HEADS,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": PIECES + 1,
}
VICUNA = LLAMA2 | {
    "_name_or_path": "vicuna-7b-v1.5",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "vocab_size": PIECES,
}
LLAMA3 = SIZE | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": HEADS // 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": LLAMA3_SIZE,
}
BEAVER_COST = LLAMA2 | {
    "architectures": ["LlamaForScore"],
    "bias": True,
    "do_normalize": True,
    "momentum": None,
    "normalizer_type": "RunningMeanStd",
    "score_dim": 1,
    "score_type": "cost",
    "transformers_version": "4.37.2",
}
ARGS_REWARD = {key: value for key, value in LLAMA2.items() if key != "pad_token_id"} | {
    "architectures": ["LlamaForSequenceClassification"],
    "torch_dtype": "float32",
    "vocab_size": PIECES,
}
LABELS = [
    "helpsteer-helpfulness",
    "helpsteer-correctness",
    "helpsteer-coherence",
    "helpsteer-complexity",
    "helpsteer-verbosity",
    "ultrafeedback-overall_score",
    "ultrafeedback-instruction_following",
    "ultrafeedback-truthfulness",
    "ultrafeedback-honesty",
    "ultrafeedback-helpfulness",
    "beavertails-is_safe",
    "prometheus-score",
    "argilla-overall_quality",
    "argilla-judge_lm",
    "code-complexity",
    "code-style",
    "code-explanation",
    "code-instruction-following",
    "code-readability",
]
QRM = LLAMA3 | {
    "architectures": ["LlamaForRewardModelWithGating31"],
    "gating_hidden_dim": GATE,
    "gating_n_hidden": 3,
    "auto_map": {
        "AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating31"
    },
    "gating_temperature": 5.0,
    "id2label": {str(n): name for n, name in enumerate(LABELS)},
    "label2id": {name: n for n, name in enumerate(LABELS)},
    "num_objectives": OBJECTIVES,
    "num_quantiles": QUANTILES,
    "pad_token_id": LLAMA3_SIZE,
    "vocab_size": LLAMA3_SIZE + 1,
}
LLAMA2_GENERATION = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VICUNA_GENERATION = LLAMA2_GENERATION | {"max_length": 4096, "temperature": 0.9, "top_p": 0.6}
LLAMA3_GENERATION = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": LLAMA3["eos_token_id"],
    "temperature": 0.6,
    "top_p": 0.9,
}
