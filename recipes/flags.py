"""The flags of `launch/train.py` besides Trainer's own, with the names of Hugging Face and TRL."""

from dataclasses import dataclass, field
from typing import Literal


def flag(default, help: str, **more):
    """Declare a field with its help text, and `more` metadata, such as choices."""
    return field(default=default, metadata={"help": help, **more})


@dataclass
class RunFlags:
    """Every flag with its type, its default and its help text."""

    recipe: str = flag("standard", "one of `recipes list`, or a file of your own: mine.yaml, mine.py:function")
    config: str | None = flag(None, "YAML with any of these settings, or a run.json; the command line wins over it")
    global_batch_size: int = flag(16, "examples, or packed sequences, per optimizer step over all processes")
    task: Literal["causal_lm", "sequence_classification"] = flag("causal_lm", "task that the model learns")
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = flag(
        None, "kind of label that a classifier learns; without it, the values in the label column decide"
    )
    fresh: bool = flag(False, "start over: the content of OUTPUT_DIR is moved aside, never deleted")
    verbose: bool = flag(False, "show the output of the libraries")
    fit: bool = flag(False, "first find the largest micro-batch that really runs here, at the same global batch")
    fit_only: bool = flag(False, "find the largest micro-batch even if fit.json has one already, and do not train")
    memory_limit: float | None = flag(
        None, "GPU memory that a process may take at most, in GB (10^9 bytes); without a GPU, RAM (accurate to 5 %)"
    )
    measure: str | None = flag(
        None, "add a line to this .jsonl file: the time of each part of a step (for `recipes scale report`)"
    )
    early_stopping_patience: int | None = flag(None, "stop after this many evaluations without improvement")

    model_name_or_path: str | None = flag(None, "Hub id or local folder; without it, a small decoder from scratch")
    from_scratch: bool = flag(False, "build the model from its config.json with random weights")
    model_revision: str = flag("main", "branch, tag or commit of the model on the Hub")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model")
    dtype: Literal["float32", "bfloat16", "float16"] = flag(
        "float32", "type of the weights in memory; mixed precision computes in bf16 or fp16 regardless"
    )
    attn_implementation: str | None = flag(None, "eager, sdpa, flash_attention_2, ...; without it, the model's default")

    use_peft: bool = flag(False, "train LoRA adapters, not the whole model")
    lora_r: int = flag(16, "rank of the LoRA matrices")
    lora_alpha: int = flag(32, "LoRA's updates are multiplied by lora_alpha / lora_r")
    lora_dropout: float = flag(0.05, "dropout before the LoRA matrices")
    lora_target_modules: list[str] | None = flag(None, "modules, such as q_proj v_proj [linear layers but the head]")
    use_dora: bool = flag(False, "DoRA: LoRA with a trained magnitude for each output; needs --use_peft")
    load_in_4bit: bool = flag(False, "QLoRA: the frozen weights in 4 bits (bitsandbytes); needs --use_peft")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = flag("nf4", "4-bit type of the frozen weights")
    use_bnb_nested_quant: bool = flag(False, "quantise the quantisation constants too")

    dataset_name: list[str] | str | None = flag(
        None,
        "Hub id, local folder, .jsonl .json .csv .parquet .txt file (.gz, .zst), or pattern; several make a mixture",
    )
    dataset_config: str | None = flag(None, "the data set's configuration on the Hub")
    dataset_train_split: str = flag("train", "split to train on, or a slice of a split, such as train[:95%]")
    dataset_test_split: str | None = flag(None, "split to evaluate on, with --eval_strategy")
    dataset_streaming: bool = flag(
        False, "read the data while training, never as a whole; needs --max_steps, and weights for a mixture"
    )
    dataset_columns: list[str] | None = flag(
        None, "rename columns, as in question=prompt answer=completion; other new names: messages, text, ..."
    )
    dataset_text_field: str = flag("text", "column that holds the text")
    dataset_label_field: str = flag(
        "label", "column that holds the class, classes or number, for sequence classification"
    )
    max_length: int = flag(
        1024, "longest sequence in tokens; longer ones are cut, packed ones have exactly this length"
    )
    dataset_num_proc: int | None = flag(None, "threads that tokenize on each node; without it, one per core")
    packing: bool = flag(False, "fill sequences of exactly max_length tokens with several examples")
    packing_strategy: Literal["bfd", "wrapped"] = flag(
        "bfd", "bfd: whole examples that do not attend to each other; wrapped: texts are joined and cut"
    )
    assistant_only_loss: bool = flag(False, "chats: learn only what the assistant says")
    completion_only_loss: bool | None = flag(None, "prompt/completion data: learn only the completion (the default)")

    gradient_as_bucket_view: bool = flag(False, "DDP: gradients stay in DDP's buckets, which saves a copy")
    ddp_comm_hook: Literal["no", "fp16", "bf16"] = flag("no", "DDP: compress gradients for communication")
    expandable_segments: bool = flag(
        False,
        "CUDA: let torch's cache grow and shrink in place (PYTORCH_ALLOC_CONF), so that less memory lies idle",
    )
    use_regional_compilation: bool = flag(False, "with --torch_compile: compile equal layers once, not the whole model")
    cudnn_benchmark: bool = flag(False, "let cuDNN time its kernels once per input shape, and use the fastest")
