"""Private names of other libraries that this package reads or overrides. A release may drop them.

Each stands in one list, with the class or module that must have it. After an upgrade of a library
the first test names those that are gone; the second finds names that the list lacks.
"""

import ast
import pkgutil
import re

import pytest

from tests.support.running import ROOT
from tests.test_rooms import files

# Module or class -> its private names; or of a private module, a name that is used.
NAMES = {
    "torch": "_grouped_mm",
    "transformers.Trainer": """
        _determine_best_metric _evaluate _finalize_training _get_num_items_in_batch _get_output_dir _get_train_sampler
        _init_training_state _issue_warnings_after_load _load_best_model _load_callback_state _maybe_log_save_evaluate
        _prepare_inputs _push_from_checkpoint _run_epoch _save _save_checkpoint
    """,
    "transformers.TrainingArguments": "_setup_devices",  # sets _n_gpu
    "transformers.PreTrainedModel": """
        _no_split_modules _supports_sdpa _supports_flash_attn _supports_flex_attn
        _supports_attention_backend
    """,
    "transformers.PretrainedConfig": "_attn_implementation",
    "transformers.AutoModelForCausalLM": "_model_mapping",
    "transformers.modeling_utils.AttentionInterface": "_global_mapping",
    "transformers.trainer_optimizer": "_OPTIMIZER_HANDLERS _BITSANDBYTES_OPTIMIZERS",
    "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref",
    "accelerate.commands.launch": "_validate_launch_command",
    "accelerate.ParallelismConfig": "_validate_accelerator",
    "accelerate.state.AcceleratorState": "_reset_state _shared_state",
    "accelerate.state.GradientState": "_set_sync_gradients",
    "deepspeed.runtime.config.DeepSpeedConfig": "_configure_train_batch_size",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch._subclasses.fake_tensor": "FakeTensorMode",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils.cpp_extension": "_get_build_directory",
    "torch.utils._pytree": "tree_leaves",
    "torch._dynamo": "list_backends",
    "torch._dynamo.backends.debugging": "boxed_nop",
    "torch._inductor": "list_mode_options",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch.nn.utils.stateless": "_reparametrize_module",
    "torch.ops.aten": "_scaled_dot_product_attention_math",
    "torch.UntypedStorage": "_cdata",
    "multiprocessing.queues.Queue": "_on_queue_feeder_error",
    "pandas._libs.parsers": "STR_NA_VALUES",
    "azure.ai.ml._schema.job.command_job": "CommandJobSchema",
    "azure.ai.ml.constants._common": "BASE_PATH_CONTEXT_KEY",
    "azure.ai.ml.entities.Command": "_to_job",
    "azure.ai.ml.entities.CommandJob": "_to_rest_object",
}
# Names that only an object has, not its class; and those that Python itself documents.
_OF_OBJECTS = """
    _action_groups _group_actions _n_gpu _experts_implementation _is_hf_initialized _drop_last _param_dict
    _config _train_batch_size _dynamo _inductor _exit _current_frames _asdict _replace _SubParsersAction _indices
    _last_lr
""".split()


@pytest.mark.parametrize("place", NAMES)
def test_an_installed_library_has_the_private_names_listed_for_it(place):
    owner = pkgutil.resolve_name(place)
    gone = [name for name in NAMES[place].split() if not hasattr(owner, name)]
    assert not gone, f"{place} has no longer {', '.join(gone)}"


def test_every_private_library_name_used_by_the_code_is_listed_in_this_test():
    nodes = [
        (path.relative_to(ROOT), node) for path in files().values() for node in ast.walk(ast.parse(path.read_text()))
    ]
    known = {*_OF_OBJECTS, *(name for names in NAMES.values() for name in names.split()), *NAMES}
    known |= {name for _, node in nodes for name in defined(node)}
    missing = {f"{path}: {name}" for path, node in nodes for name in private(node) if name not in known}
    assert not missing, "\n" + "\n".join(sorted(missing))


def defined(node: ast.AST) -> list[str]:
    """The names that a statement of ours defines, of attributes those of self."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return [node.attr] if own and isinstance(node.ctx, ast.Store) else []


def private(node: ast.AST) -> list[str]:
    """The private attribute that an expression reads, or the private module of an import."""
    names = [node.attr] if isinstance(node, ast.Attribute) else []
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return [name for name in names if re.search(r"(^|\.)_(?!_)", name)]
