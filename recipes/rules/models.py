"""Whether train.py can train the model: its folder, type, task, length and stored weights.

Of a local folder all of this is known before the start. Of a model on the Hub it is known once its
config.json is downloaded: train.py then applies the same rules again.
"""

from __future__ import annotations

import re
from pathlib import Path

from recipes.errors import Problem
from recipes.legal import models, version
from recipes.rules.facts import (
    advice,
    available,
    known_config,
    mapping,
    missing,
    model_config,
    of_train_py,
    problem,
    rule,
)
from recipes.run import RunSpec
from recipes.run.engine import Json
from recipes.run.local_model import (
    config_value,
    damage,
    existing_path,
    foreign_content,
    has_weights,
    is_classifier,
    max_positions,
    model_folder,
    tensor_names,
    weight_files,
)

_ENCODERS = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}


def _type(run: RunSpec) -> str:
    """The `model_type`; empty if it is unknown."""
    return str(known_config(run).get("model_type") or "")


def _about_model(run: RunSpec, what: str, fix: str) -> Problem:
    return problem(run, "model_name_or_path", what, fix)


# --- The folder -----------------------------------------------------------------------------------


@rule
@of_train_py
def the_model_is_a_folder(run):
    """Libraries look for a missing path on the Hub, and say that the repository is not found."""
    name = run["model_name_or_path"]
    if not name or run.elsewhere is not None or model_folder(name):
        return
    if existing_path(name):
        yield _about_model(run, f"{name} is a file", "the folder that holds config.json and the weights")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        yield _about_model(run, f"there is no folder {name}", "an existing folder, or a Hub id")


@rule
@of_train_py
def the_folder_holds_a_model(run):
    """`OSError: no file named model.safetensors found`, or a tokenizer without any vocabulary."""
    folder = model_folder(run["model_name_or_path"])
    if folder is None or run.elsewhere is not None:  # it may hold more where the run goes
        return
    if not (folder / "config.json").exists():
        adapters = (folder / "adapter_config.json").exists()
        what = "holds LoRA adapters without their base model" if adapters else "has no config.json"
        merge = f"`recipes merge {folder}`, then --model_name_or_path {folder / 'merged'}"
        fix = merge if adapters else "a folder that save_pretrained wrote"
        yield _about_model(run, f"the folder {folder} {what}", fix)
    elif model_config(run) is None:
        file = folder / "config.json"
        what, fix = foreign_content(file) or ("is not a JSON object", "the config.json that save_pretrained wrote")
        yield _about_model(run, f"{file} {what}", fix)
    elif not has_weights(folder) and not run["from_scratch"]:
        what = f"the folder {folder} has a config.json and no weights"
        yield _about_model(run, what, "a folder with model.safetensors too; or --from_scratch, for random weights")
    elif not _has_tokenizer(folder) and models.tokenizer_needs_files(_type(run)):
        # BERT's tokenizer, for example, is loaded with five tokens, and all text is unknown to it.
        fix = "tokenizer.save_pretrained into the same folder"
        yield _about_model(run, f"the folder {folder} has no tokenizer", fix)


@rule
@of_train_py
def the_weights_are_whole(run):
    """`SafetensorError: incomplete metadata, file not fully covered`, and others of that kind. A
    download may have left a pointer or a web page in its place.
    """
    folder = model_folder(run["model_name_or_path"])
    if folder is None or run.elsewhere is not None or run["from_scratch"]:
        return
    for file in weight_files(folder):
        found = damage(file)
        if found:
            yield _about_model(run, f"{file} {found[0]}", found[1])


@rule
@of_train_py
def the_configuration_has_numbers(run):
    """`StrictDataclassFieldValidationError: Field 'num_attention_heads' expected int, got str`"""
    folder, config = model_folder(run["model_name_or_path"]), known_config(run)
    if folder is None or run.model is not None or _code(run, "AutoConfig"):
        return
    numbers = models.config_numbers(_type(run))
    for key in sorted(config.keys() & numbers):
        is_null = config[key] is None and not numbers[key]
        if isinstance(config[key], (str, list, dict)) or is_null:
            value = "null" if is_null else repr(config[key])
            what = f"{folder / 'config.json'} has {key} {value}, which is not a number"
            yield _about_model(run, what, f"a number for {key}, as save_pretrained wrote it")


@rule
@of_train_py
def the_configuration_divides_evenly(run):
    """`The hidden size (32) is not a multiple of the number of attention heads (5)`"""
    config = known_config(run)
    if run["model_name_or_path"] is None or run.model is not None or _code(run, "AutoConfig"):
        return
    for whole, parts in models.config_multiples(_type(run)):
        size, count = config.get(whole), config.get(parts)
        if type(size) is int and type(count) is int and count and size % count:
            what = f"{_config_file(run)} has {whole} {size}, not a multiple of its {parts}, {count}"
            yield _about_model(run, what, f"a {parts} that divides {size}, as save_pretrained wrote it")


# Fields for dropout that both tasks read; other heads have theirs, such as `classifier_dropout`.
_DROPOUT = re.compile(
    r"((attention|attention_probs|hidden|activation|embedding|resid|embd|attn)_)?(dropout|pdrop)(_prob|_rate)?"
)


@rule
@of_train_py
def dropout_is_a_probability(run):
    """`dropout probability has to be between 0 and 1, but got 1.5`, some only in the first step."""
    config, kind = known_config(run), _type(run)
    if run["model_name_or_path"] is None or _code(run, "AutoConfig"):
        return
    for key in sorted(config.keys() & models.config_numbers(kind)):
        value = config[key]
        if type(value) not in (int, float) or 0 <= value <= 1 or not _DROPOUT.fullmatch(key):
            continue
        if models.source_names(kind, f"config.{key}"):
            what = f"{_config_file(run)} has {key} {value}, which is not a probability"
            yield _about_model(run, what, f"a number from 0 to 1 for {key}")


def _config_file(run: RunSpec) -> str:
    folder = model_folder(run["model_name_or_path"])
    return str(folder / "config.json") if folder else f"the config.json of {run['model_name_or_path']}"


_BESIDE_A_TOKENIZER = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "trainer_state.json",
    "run.json", "fit.json", "all_results.json", "train_results.json", "eval_results.json", "requirements.txt",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip


def _has_tokenizer(folder: Path) -> bool:
    """Whether any file may be a tokenizer's: they have many names."""
    not_its = (".safetensors", ".bin", ".index.json", ".md", ".py", ".pt", ".pth", ".h5", ".msgpack", ".log")
    names = (path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    return any(name not in _BESIDE_A_TOKENIZER and not name.endswith(not_its) for name in names)


# --- The type and the task ------------------------------------------------------------------------


def _code(run: RunSpec, auto_class: str) -> bool:
    """Whether the model brings Python code of its own for one of transformers' auto classes."""
    return auto_class in mapping(known_config(run).get("auto_map"))


def _untrusted(run: RunSpec) -> Problem:
    what = f"{run['model_name_or_path']} comes with Python code"
    return Problem(
        "trust_remote_code", what, "read it, then --trust_remote_code", run.setting("trust_remote_code").source
    )


@rule
@of_train_py
def the_model_type_is_known(run):
    """`Transformers does not recognize this architecture`, or it would run the model's own code."""
    kind = _type(run)
    if (
        run["model_name_or_path"] is None
        or run.model is not None
        or model_config(run) is None
        or kind in models.known_types()
        or not models.known_types()
    ):
        return  # a configuration that was loaded is one that transformers, or a script, knows
    if _code(run, "AutoConfig"):
        if not run["trust_remote_code"]:
            yield _untrusted(run)
        return
    what = f"has the type {kind!r}, which transformers {version('transformers')} does not know"
    fix = "pip install --upgrade transformers, or another model"
    if not kind:
        what, fix = "has no model_type in its config.json", "the config.json that save_pretrained wrote"
    say = problem if run.elsewhere is None else advice  # there may be another transformers there
    yield say(run, "model_name_or_path", f"{run['model_name_or_path']} {what}", fix)


@rule
@of_train_py
def the_model_can_do_the_task(run):
    """`Unrecognized configuration class ... for this kind of AutoModel: AutoModelForCausalLM.`"""
    kind, task = _type(run), run["task"]
    if (
        run["model_name_or_path"] is None
        or kind not in models.known_types()
        or task not in _AUTO_CLASSES
        or models.model_class(kind, task)
    ):
        return
    if not _code(run, _AUTO_CLASSES[task]):
        others = [other for other in _AUTO_CLASSES if models.model_class(kind, other)]
        fix = f"--task {others[0]}, or another model" if others else "another model"
        yield _about_model(run, f"transformers has no {kind} model for {task}", fix)
    elif not run["trust_remote_code"]:
        yield _untrusted(run)


@rule
@of_train_py
def a_language_model_is_a_decoder(run):
    """An encoder loads, and its loss falls: it sees the tokens that it has to predict."""
    config, kind = known_config(run), _type(run)
    if run["model_name_or_path"] is None or run["task"] != "causal_lm" or kind not in models.model_types(_ENCODERS):
        return
    if not config_value(config, "is_encoder_decoder") and not config_value(config, "is_decoder"):
        what = f"{run['model_name_or_path']} is an encoder ({kind}): it sees the tokens it has to predict"
        yield _about_model(run, what, "a decoder, or --task sequence_classification")


@rule
@of_train_py
def a_language_model_has_its_head(run):
    """A classifier's weights have no language-model head: it starts with random values."""
    config = known_config(run)
    if run["from_scratch"] or run["task"] != "causal_lm":
        return
    if is_classifier(config) and config_value(config, "tie_word_embeddings") is False:
        what = f"{run['model_name_or_path']} is a classifier: its language-model head starts with random values"
        yield advice(run, "model_name_or_path", what, "--task sequence_classification, or the model it was made from")


@rule
@of_train_py
def sequences_fit_the_model(run):
    """`IndexError: index out of range in self`, or a device-side assert in the embedding.

    A length that the user did not write is lowered instead.
    """
    positions = max_positions(known_config(run))
    if positions and run.explicit("max_length") and run["max_length"] > positions:
        what = f"{run['max_length']} tokens are more than the {positions} positions the model has"
        yield problem(run, "max_length", what, f"--max_length {positions} or less")


@rule
@of_train_py
def separate_examples_need_positions(run):
    """Only position_ids tell a model where the examples of a row begin: BLOOM and Mamba have none.

    Some models have them and ignore them: train.py tries it. A recipe's own packing is left out.
    """
    packs = run["packing"] and run["packing_strategy"] == "bfd" and run.explicit("packing")
    kind = _type(run)
    name = models.model_class(kind, "causal_lm") if run["task"] == "causal_lm" else None
    if not name or models.has_argument(kind, name, "position_ids") is not False:
        return
    what = f"a {kind} model lets the examples of a row see each other"
    if run["padding_free"]:
        yield problem(run, "padding_free", what, "--padding_free false")
    elif packs:
        yield problem(run, "packing", what, "--packing_strategy wrapped, or --packing false")


# --- What LoRA adapts -----------------------------------------------------------------------------


@rule
@of_train_py
def lora_adapts_modules_of_the_model(run):
    """train.py refuses a module that the loaded model does not have; so does peft.

    A name in the model's code is left to train.py: transformers renames some weights as it loads.
    """
    folder, wanted = model_folder(run["model_name_or_path"]), run["lora_target_modules"]
    names = tensor_names(folder) if folder and run["use_peft"] and wanted and wanted != ["all-linear"] else []
    parts = {part for name in names for part in name.split(".")}
    absent = [
        target
        for target in wanted or ()
        if parts and target.rpartition(".")[2] not in parts and models.source_names(_type(run), target) is False
    ]
    if absent:
        modules = sorted({name.split(".")[-2] for name in names if name.endswith("_proj.weight")})
        fix = "some of " + " ".join(modules) if modules else "modules of this model, or all-linear"
        yield problem(run, "lora_target_modules", f"the model has no module {', '.join(absent)}", fix)


@rule
@of_train_py
def lora_leaves_mambas_output_alone(run):
    """`Module 'out_proj' is incompatible with Mamba-based models`: their kernels use its weight."""
    refused = models.refused_by_lora(_type(run)) if run["use_peft"] and _type(run) else frozenset()
    wanted = run["lora_target_modules"] or ["all-linear"]
    if not refused or not (wanted == ["all-linear"] or refused & {target.rpartition(".")[2] for target in wanted}):
        return
    what = f"peft adapts no {' and no '.join(sorted(refused))} of a {_type(run)} model"
    if wanted == ["all-linear"]:
        what += ", and all-linear takes them in"
    yield problem(run, "use_peft", what, "--lora_target_modules with other modules, such as in_proj")


# --- Trained and stored weights -------------------------------------------------------------------


@rule
@of_train_py
def from_scratch_is_about_a_model(run):
    """It trains as asked, though a model's weights lie unused, or no model is named."""
    if not run["from_scratch"]:
        return
    folder = model_folder(run["model_name_or_path"])
    if run["model_name_or_path"] is None:
        what = "is ignored without a model: the small decoder is trained from scratch anyway"
        yield advice(run, "from_scratch", what, "--model_name_or_path with a folder that has a config.json")
    elif folder and has_weights(folder):
        what = f"trains random weights, not those in {folder}"
        yield advice(run, "from_scratch", what, "leave it out to go on from the trained ones")


@rule
@of_train_py
def stored_weights_can_be_trained(run):
    """`You cannot perform fine-tuning on purely quantized models`, or on the method at all."""
    stored = stored_as(run)
    if not stored or mapping(known_config(run).get("quantization_config")).get("dequantize"):
        return
    title = f"{run['model_name_or_path']} has weights quantised with {stored}"
    if run["load_in_4bit"] and not stored.startswith("bitsandbytes"):
        # `The model is quantized with GPTQConfig but you are passing a BitsAndBytesConfig config.`
        yield problem(run, "load_in_4bit", f"{title}, which bitsandbytes cannot load", "leave it out")
    elif models.trains_quantised(stored, adapters=True) is False:
        yield _about_model(run, f"{title}, which cannot be trained", "the model that is not quantised")
    elif not run["use_peft"] and models.trains_quantised(stored, adapters=False) is False:
        yield _about_model(run, f"{title}, which only train with adapters", "--use_peft")
    elif stored.startswith("bitsandbytes") and not available(run, "bitsandbytes"):
        yield missing(run, "model_name_or_path", "bitsandbytes")


@rule
@of_train_py
def stored_weights_stay_as_they_are(run):
    """The folder's own configuration wins, with a warning."""
    if not run["load_in_4bit"] or not stored_as(run).startswith("bitsandbytes"):
        return
    for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant"):
        if run.explicit(name):
            yield advice(run, name, "is ignored: the model's weights are quantised already", "leave it out")
    if stored_as(run).endswith("8bit"):
        what = "is ignored: the model's weights are quantised already, in 8 bits"
        yield advice(run, "load_in_4bit", what, "leave it out, or the model that is not quantised")


def stored_as(run: RunSpec) -> str:
    """How the model's weights are quantised, as transformers names it; empty if they are not."""
    section = known_config(run).get("quantization_config")
    if not isinstance(section, dict) or run["from_scratch"]:
        return ""
    method = str(section.get("quant_method") or ("bitsandbytes" if _bits(section) else ""))
    return f"{method}_{_bits(section)}" if method == "bitsandbytes" else method


def _bits(section: Json) -> str:
    return "8bit" if section.get("load_in_8bit") else "4bit" if section.get("load_in_4bit") else ""
