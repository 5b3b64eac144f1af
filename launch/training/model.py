"""A run's tokenizer and model: loaded or created, in 4 bits and with adapters if requested."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from transformers.integrations.deepspeed import initialize_weights_zero3

from launch.data.demo import demo_config, demo_tokenizer
from launch.host.memory import ran_out
from launch.host.world import launched
from launch.terminal import console, print_note
from launch.training.separate import with_separate_examples
from recipes.errors import Problem, UserError, mistake, one_line, plural, raise_errors
from recipes.planner.memory import optimizer_bytes_per_parameter
from recipes.rules.check import new_problems
from recipes.rules.data_and_model import freeze_parts_without_text, refused_by_class, what_peft_accepts
from recipes.rules.local_model import is_classifier, max_positions
from recipes.run import Json, RunSpec, Settings
from recipes.run.files import existing_path, expanded


def load_tokenizer(run: Settings) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with a padding token. An unreadable tokenizer raises `UserError`."""
    name = run["model_name_or_path"]
    if name is None:
        return demo_tokenizer()
    with _loading(run, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(str(expanded(name)), **_origin(run))
    if tokenizer.pad_token is None:
        # Reuse a token, because a new token would resize the embeddings.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_model(
    run: RunSpec, tokenizer: PreTrainedTokenizerBase, labels: list[str] | None = None, problem_type: str | None = None
) -> torch.nn.Module:
    """Load or create the model to train: a PreTrainedModel, or a PeftModel around it. `labels` and
    `problem_type` are those of a classifier's data.

    Raises `UserError` if the model cannot be loaded, or cannot be trained with these settings.
    """
    set_seed(run["seed"])  # new heads, adapters and models from scratch are equal on every rank
    new: list[str] = []
    config = load_config(run, tokenizer, labels, problem_type)
    if run["model_name_or_path"] and _waits_for_weights(run):
        with no_init_weights():  # uninitialized weights take no RAM until they are written
            model = _built(run, config)
        model.tie_weights()
    elif run["from_scratch"] or run["model_name_or_path"] is None:
        model = _from_scratch(run, config)
    else:
        model, new = _pretrained(run, config)
    # With a cache, transformers ignores where the examples of a packed row begin. Multimodal models
    # read `use_cache` from the configuration of their text model.
    model.config.use_cache = model.config.get_text_config().use_cache = False
    # Classifiers find a text's last token by the padding token. Set this token only after the model
    # is built: an embedding built with a padding_idx never trains that token, which may be EOS.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        _require_valid_generation_config(run, model)
        if tokenizer.chat_template:
            _stop_after_answers(model, tokenizer)
    require_batches_for_batch_norm(run, model)
    freeze_parts_without_text(model)
    return with_adapters(run, model, new) if run["use_peft"] else model


def _require_valid_generation_config(run: Settings, model: PreTrainedModel) -> None:
    """Set `do_sample` in a generation config that transformers refuses to save, such as Vicuna's:
    github.com/huggingface/transformers/issues/29988. Raise `UserError` if transformers still
    refuses, because the refusal would end the run at its first checkpoint.
    """
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True
    with _loading(run, "model"):
        model.generation_config.validate(strict=True)


def _stop_after_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `generate` stop at the special token that the chat template writes after an answer. Many
    base models stop only at the end of a document: github.com/huggingface/open-r1/issues/603
    """
    chat = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."}]
    try:
        after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(chat[1]["content"])[2].lstrip()
    except Exception:  # the template is a program that need not accept this chat
        return
    first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    stops = model.generation_config.eos_token_id
    known = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if special & {*first} - {*known}:
        model.generation_config.eos_token_id = [*known, *first]


def known_classes(run: Settings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a trained classifier's class names in the order of outputs; empty for other models."""
    config = load_config(run, tokenizer)
    if not is_classifier({"architectures": config.architectures}):
        return []
    return [config.id2label[number] for number in sorted(config.id2label)]


def with_model(run: RunSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[RunSpec, list[Problem]]:
    """Add the model's configuration to the run, and change settings that the model does not support
    (max_length, packing, attention). Return the run, and the advice that needs the configuration.

    Raises `UserError` if the configuration cannot be read, or does not allow the user's settings.
    """
    config = load_config(run, tokenizer)
    content = described(config)
    known = replace(run, model=content)
    known = known.limited("max_length", max_positions(content), "the longest sequence of this model")
    cls = auto_class(run)._model_mapping.get(type(config), None)  # None if the model's code comes with the weights
    refusal = run["attn_implementation"] == "flex_attention" and _refuses_flex(cls, content)
    if refusal and not run.explicit("attn_implementation"):
        known = known.overruled("attn_implementation", None, f"the model's default: {refusal}")
    found = [*new_problems(known, run), *map(run.with_source, refused_by_class(known, cls) if cls else ())]
    if run["gradient_checkpointing"] and cls and not cls.supports_gradient_checkpointing:
        what, fix = f"{cls.__name__} has no gradient checkpointing", "--gradient_checkpointing false"
        found.append(run.with_source(Problem("gradient_checkpointing", what, fix)))
    raise_errors(found)
    known, advice = with_separate_examples(known, config)
    return known, [*found, *advice]


def _refuses_flex(cls: type | None, config: Json) -> str:
    """Return the reason against flex attention for this model; empty if there is none.

    With dropout in attention, transformers raises `ValueError`. Heads need at least 16 dimensions
    in torch; above 128, torch's backward kernel exceeds the shared memory of many GPUs.
    """
    text = config.get("text_config", config)
    width = text.get("head_dim") or text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
    if cls is None or not getattr(cls, "_supports_flex_attn", False):
        return "the model has no flex attention"
    if any(value for name, value in text.items() if name in ("attention_dropout", "attn_pdrop")):
        return "flex attention does not support dropout"
    return "" if 16 <= width <= 128 else f"flex attention is not used for heads of {width} dimensions"


def described(config: PreTrainedConfig) -> Json:
    """Return the configuration as a dict. Add common names, such as `hidden_size` for `n_embd`."""
    shared = {name: getattr(config, name, None) for name in config.attribute_map}
    content, text = {**config.to_dict(), **shared}, config
    with contextlib.suppress(ValueError):  # MusicGen has two text configurations
        text = config.get_text_config()
    return content if text is config else {**content, "text_config": described(text)}


def parameter_count(model: torch.nn.Module, trained_only: bool = False) -> int:
    """Count the parameters of a loaded model. Tied parameters count once, a shard counts as the
    whole parameter, and a byte of 4-bit weights counts as two parameters.
    """
    return sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained_only)


def saved_bytes(model: torch.nn.Module, run: RunSpec) -> int:
    """Estimate the bytes of the final trained weights plus one checkpoint, if any is saved. The
    checkpoint holds these weights again and, without `save_only_model`, the optimizer's states.
    """
    width = max((parameter.element_size() for parameter in model.parameters() if parameter.requires_grad), default=4)
    of_optimizer = 0 if run["save_only_model"] else optimizer_bytes_per_parameter(run)
    checkpoint = width + of_optimizer if run["save_strategy"] != "no" else 0
    return round(parameter_count(model, trained_only=True) * (width + checkpoint))


def _size(parameter: torch.nn.Parameter) -> int:
    if hasattr(parameter, "ds_numel"):  # a shard of ZeRO-3
        return parameter.ds_numel
    return 2 * parameter.nbytes if type(parameter).__name__ == "Params4bit" else parameter.numel()


# --- Loading --------------------------------------------------------------------------------------


def load_config(
    run: Settings, tokenizer: PreTrainedTokenizerBase, labels: list[str] | None = None, problem_type: str | None = None
) -> PreTrainedConfig:
    """Return the configuration with these `labels`. An unreadable file raises `UserError`."""
    config = demo_config(tokenizer) if run["model_name_or_path"] is None else read_config(run)
    if run["from_scratch"] and hasattr(config, "quantization_config"):
        del config.quantization_config  # describes weights that are not read
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
        config.problem_type = problem_type
    return config


def read_config(run: Settings) -> PreTrainedConfig:
    """Read a valid configuration from the folder or the Hub, or raise `UserError`."""
    with _loading(run, "model"):
        return AutoConfig.from_pretrained(str(expanded(run["model_name_or_path"])), **_origin(run))


@contextlib.contextmanager
def _loading(run: Settings, what: str) -> Iterator[None]:
    """Convert any error in loading a "model" or "tokenizer" (`what`) to `UserError`, unless memory
    ran out, or the run names neither model nor attention. A bad file may cause any kind of error.
    """
    try:
        yield
    except Exception as error:
        name, attention = run["model_name_or_path"], run["attn_implementation"]
        if ran_out(error) or isinstance(error, UserError) or not (name or attention):
            raise
        flag, fix = "model_name_or_path", "use a folder where save_pretrained wrote model and tokenizer for this --task"
        if "trust_remote_code" in str(error):
            flag, fix = "trust_remote_code", "read the model's own Python code, then set --trust_remote_code"
        elif attention and re.search("ttention|attn|`kernels`", str(error)):
            flag, fix = "attn_implementation", "leave --attn_implementation out: the default is the best available"
        elif existing_path(name) is None:
            fix = "use a local folder; for the Hub, check the spelling, the network and `hf auth login`"
        said = "huggingface.co cannot be reached" if "couldn't connect" in str(error) else one_line(error)
        raise mistake(flag, f"{name or 'the demonstration'} cannot be loaded as a {what}: {said}", fix) from None


def _from_scratch(run: Settings, config: PreTrainedConfig) -> PreTrainedModel:
    """Create the model with random weights, equal on all ranks and, on CPUs, under all engines. On
    GPUs, ZeRO-3 draws other numbers. Under ZeRO-3, transformers before 5.23 does not scale GPT-2's
    residual projections.
    """
    with _loading(run, "model"):
        model = _built(run, config)
    # Except under ZeRO-3, the constructors drew random numbers: set the seed, and initialize again.
    for module in model.modules():
        module._is_hf_initialized = False
    set_seed(run["seed"])
    initialize_weights_zero3(model) if is_deepspeed_zero3_enabled() else model.initialize_weights()
    return model


def _built(run: Settings, config: PreTrainedConfig) -> PreTrainedModel:
    return auto_class(run).from_config(
        config, dtype=getattr(torch, run["dtype"]), trust_remote_code=run["trust_remote_code"], **_attention(run)
    )


def _waits_for_weights(run: Settings) -> bool:
    """True if FSDP2 sends rank 0's weights to this process, which then need not read them."""
    sends = is_fsdp_enabled() and os.environ.get("FSDP_VERSION") == "2" and not run["load_in_4bit"]
    return sends and torch.distributed.get_rank() > 0


def _pretrained(run: Settings, config: PreTrainedConfig) -> tuple[PreTrainedModel, list[str]]:
    """Load the model. Also return the names of modules with new random weights, except `_HEADS`."""
    options = {"dtype": getattr(torch, run["dtype"]), "ignore_mismatched_sizes": True} | _origin(run) | _attention(run)
    if run["load_in_4bit"]:
        options["quantization_config"] = _in_4_bits(run)
        if not is_deepspeed_zero3_enabled():  # ZeRO-3 places the weights itself and refuses a device map
            on_cpu = run["use_cpu"] or not torch.cuda.is_available()
            options["device_map"] = {"": "cpu" if on_cpu else int(os.environ.get("LOCAL_RANK", 0))}
    with _loading(run, "model"):
        name = run["model_name_or_path"]
        if folder := existing_path(name):  # absolute: an adapter saves this path, and may be loaded from any folder
            name = str(folder.resolve())
        model, info = auto_class(run).from_pretrained(name, config=config, output_loading_info=True, **options)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # bitsandbytes 0.50: wrong gradients after an evaluation
            layer.support_avx512bf16_for_cpu = False
    for weight, held, needed in (mismatched := sorted(info["mismatched_keys"])):
        if run["task"] != "sequence_classification" or (needed[0], *held[1:]) != (config.num_labels, *needed[1:]):
            what = f"{name} holds {weight} of shape {tuple(held)}, and its config.json describes {tuple(needed)}"
            raise mistake("model_name_or_path", what, "use the weights that were saved with this config.json")
    if mismatched:
        note = f"{name} has {held[0]} outputs, and these data need {needed[0]}: its head is replaced by a new one"
        print_note(note, console(launched().is_main))
    weights = [weight for weight, _ in model.named_parameters()]
    lacking = sorted(set(weights) & set(info["missing_keys"]))
    if len(lacking) == len(weights):  # the files hold another model or no weights
        what = f"{name} holds none of the {len(weights)} weights that its config.json describes, such as {lacking[0]}"
        raise mistake("model_name_or_path", what, "use the weights that were saved with this config.json")
    if lost := [weight for weight in lacking if not {*_HEADS} & {*weight.split(".")}]:
        note = f"{name} lacks {plural(len(lost), 'weight')}, such as {lost[0]}: they begin with random values"
        print_note(note, console(launched().is_main))
    lost += [weight for weight, *_ in mismatched if not {*_HEADS} & {*weight.split(".")}]
    return model, [weight.removesuffix(".weight") for weight in lost if weight.endswith(".weight")]


def auto_class(run: Settings) -> type[AutoModelForCausalLM | AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if run["task"] == "sequence_classification" else AutoModelForCausalLM


def _origin(run: Settings) -> dict[str, object]:
    return {"revision": run["model_revision"], "trust_remote_code": run["trust_remote_code"]}


def _attention(run: Settings) -> dict[str, object]:
    return {"attn_implementation": run["attn_implementation"]} if run["attn_implementation"] else {}


# --- BatchNorm ------------------------------------------------------------------------------------


def require_batches_for_batch_norm(run: Settings, model: PreTrainedModel) -> None:
    """Raise `UserError` if BatchNorm would get a single example, because BatchNorm then fails, or
    cannot learn how examples differ. SyncBatchNorm gets the examples of all processes.
    """
    kinds = {type(module) for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)}
    if kinds - {torch.nn.SyncBatchNorm} and run["per_device_train_batch_size"] == 1:
        fix = "set --per_device_train_batch_size 2, and a --global_batch_size divisible by 2 x num_processes"
        raise mistake("per_device_train_batch_size", "is 1, and this model's BatchNorm needs 2 examples", fix)


# --- 4 bits and adapters --------------------------------------------------------------------------


# In a classifier, peft trains modules with these endings (also `pre_classifier`) without LoRA.
_HEADS = ("classifier", "score")
_OTHER_HEADS = ("classification_head", "logits_proj", "sequence_summary")  # BART, T5; XLNet, XLM


def _in_4_bits(run: Settings) -> BitsAndBytesConfig:
    compute = torch.bfloat16 if run["bf16"] else torch.float16 if run["fp16"] else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=run["bnb_4bit_quant_type"],
        bnb_4bit_use_double_quant=run["use_bnb_nested_quant"],
        bnb_4bit_compute_dtype=compute,
        # Otherwise transformers 5.23 quantises a head that has a bias.
        llm_int8_skip_modules=[*_HEADS, *_OTHER_HEADS] if run["task"] == "sequence_classification" else None,
        # FSDP shards only floats of one type: weights stored as bytes would stay whole on each GPU.
        bnb_4bit_quant_storage=compute if is_fsdp_enabled() else None,
    )


def with_adapters(run: Settings, model: PreTrainedModel, new: Sequence[str] = ()) -> torch.nn.Module:
    """Add LoRA to the model; raises `UserError` if peft refuses. Under mixed precision, the trained
    weights are float32, except with FSDP or ZeRO-3. `new` names modules with random weights, which
    are trained and saved whole, because each load would draw other values. Frozen weights keep the
    type `dtype`, also in a 4-bit model: peft's own preparation would convert embeddings and head to
    float32, and thereby all activations between the layers.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    if run["gradient_checkpointing"]:
        model.enable_input_require_grads()  # else frozen embeddings cut the recomputed blocks off the graph
    if torch.distributed.is_initialized():
        new = launched().decide(lambda: list(new))  # under FSDP2, only rank 0 has read the files
    for layer in map(model.get_submodule, new):
        if type(layer).__name__ == "Linear4bit":  # transformers does not quantise such new weights
            layer.__class__ = torch.nn.Linear
    whole = [*new, *(_HEADS if run["task"] == "sequence_classification" else ())]
    others = [f".*{re.escape(name)}" for name in whole] + freeze_parts_without_text(model)
    lora = LoraConfig(
        r=run["lora_r"],
        lora_alpha=run["lora_alpha"],
        lora_dropout=run["lora_dropout"],
        target_modules=_target_modules(run, model),
        modules_to_save=list(new) or None,
        exclude_modules="|".join(others) or None,
        use_dora=run["use_dora"],
        task_type=TaskType.CAUSAL_LM if run["task"] == "causal_lm" else TaskType.SEQ_CLS,
    )
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:  # for example, LoRA on experts refuses dropout
        fix = what_peft_accepts(" ".join(str(error).split()), run["use_dora"])
        raise mistake("use_peft", f"peft refuses this model: {one_line(error)}", fix) from None
    if (run["bf16"] or run["fp16"]) and not (is_fsdp_enabled() or is_deepspeed_zero3_enabled()):
        for parameter in filter(lambda one: one.requires_grad, adapted.parameters()):
            parameter.data = parameter.data.float()  # peft copies a classifier's head in the model's type
    return adapted


def _target_modules(run: Settings, model: PreTrainedModel) -> list[str] | str:
    """Return the modules that get LoRA. Raise `UserError` for a name that peft would ignore."""
    wanted = run["lora_target_modules"]
    if not wanted or wanted == ["all-linear"]:
        return "all-linear"
    modules = {f".{name}": type(module).__name__ for name, module in model.named_modules()}
    if missing := [target for target in wanted if not any(name.endswith(f".{target}") for name in modules)]:
        linear = {name.rpartition(".")[2] for name, kind in modules.items() if re.search("Linear|Conv1D", kind)}
        fix = "choose from " + ", ".join(sorted(linear)[:12]) + ", and separate names by spaces"
        raise mistake("lora_target_modules", f"the model has no module {', '.join(missing)}", fix)
    return wanted
