"""Tables of model types, such as `llama`, that the installed libraries keep."""

from recipes.legal.schema import facts, names

# The model types of liger-kernel 0.8.5, for plans on a machine without this package.
_LIGER = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe "
    "gpt_oss internvl llama llama4 llama4_text llava mllama mllama_text_model ministral mistral mixtral muse_glimmer "
    "nemotron olmo2 olmo3 qwen2 qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_next qwen3_5 "
    "qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text smollm3 phi3 "
    "paligemma falcon_h1 smolvlm hunyuan_v1_dense hunyuan_v1_moe exaone4".split()
)


def model_class(model_type: str, task: str) -> str | None:
    """Return the class of a type for a task, such as `LlamaForCausalLM`; None if there is none."""
    return facts().get("model_classes", {}).get(task.upper(), {}).get(model_type)


def known_types() -> frozenset[str]:
    """Every model type in the installed transformers; empty if its tables are not found."""
    return frozenset(names("model_types"))


def types_with_fused_loss() -> frozenset[str]:
    """The model types whose loss Liger by default computes without the full logits."""
    return frozenset(names("liger")) or _LIGER
