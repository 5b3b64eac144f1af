"""Rules about batches, and what happens without them."""

from __future__ import annotations

import pytest

from tests.support.real_failures import assert_fires, tiny_llama, train
from tests.support.runs import A100, CLASSIFY, Run, machine

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "batch_size_is_not_searched": (Run("--auto_find_batch_size"), Run("--auto_find_batch_size false")),
    "accumulation_is_said_once": (
        Run('--accelerator_config {"gradient_accumulation_kwargs":{"num_steps":4}}'),
        Run("--gradient_accumulation_steps 4"),
    ),
    "fit_chooses_the_micro_batch": (
        Run("--fit --per_device_train_batch_size 2"),
        Run("--fit --global_batch_size 8"),
    ),
    "batches_are_not_split": (
        Run('--accelerator_config {"split_batches":true}', world=2),
        Run('--accelerator_config {"split_batches":true}', world=1),
    ),
    "batches_come_out_even": (
        Run('--accelerator_config {"even_batches":false}', world=2),
        Run('--accelerator_config {"even_batches":false}'),
    ),
    "worker_settings_need_workers": (
        Run("--dataloader_prefetch_factor 4 --dataloader_num_workers 0"),
        Run("--dataloader_prefetch_factor 4 --dataloader_num_workers 1"),
    ),
    "dispatched_batches_have_one_shape": (
        Run('--packing false --accelerator_config {"dispatch_batches":true}', world=2),
        Run('--packing --accelerator_config {"dispatch_batches":true}', world=2),
    ),
    "no_state_is_configured_before": (
        Run('--accelerator_config {"use_configured_state":true}'),
        Run('--accelerator_config {"use_configured_state":false}'),
    ),
    "packing_frees_the_padding": (Run("--packing --padding_free"), Run("--packing false --padding_free")),
    "padding_free_needs_flash_attention": (
        Run("--padding_free --packing false"),
        Run("--padding_free --packing false --attn_implementation flash_attention_2"),
    ),
    "classification_takes_rows_as_they_are": (Run(f"{CLASSIFY} --packing"), Run(CLASSIFY)),
    "label_settings_need_labels": (
        Run("--problem_type regression"),
        Run(f"{CLASSIFY} --problem_type regression --dataset_label_field score"),
    ),
    "classification_needs_data": (Run("--task sequence_classification"), Run(CLASSIFY)),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (
        "label_settings_need_labels",
        Run(f"{CLASSIFY} --problem_type regression --label_smoothing_factor 0.1"),
        "label_smoothing_factor",
    ),
    ("worker_settings_need_workers", Run("--dataloader_persistent_workers"), "dataloader_persistent_workers"),
    ("worker_settings_need_workers", Run("--dataloader_multiprocessing_context spawn"), "multiprocessing_context"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("worker_settings_need_workers", Run("--recipe fast --dataloader_num_workers 0", hardware=machine(A100))),
]


def test_a_batch_size_that_is_searched_changes_the_global_batch(tmp_path):
    model, rows = tiny_llama(), []
    forward = model.forward

    def with_little_memory(input_ids, **inputs):
        if len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory.")
        rows.append(len(input_ids))
        return forward(input_ids=input_ids, **inputs)

    model.forward = with_little_memory
    settings = dict(auto_find_batch_size=True, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert (train(tmp_path, model=model, **settings).state.global_step, sum(rows)) == (2, 2 * 2)  # not 2 * 4
    assert_fires("batch_size_is_not_searched", settings)


def test_split_batches_divide_the_global_batch_by_the_processes():
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    seen = {}
    for split in (False, True):
        loader = DataLoader(range(16), batch_size=4)
        mine = prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=split, put_on_device=False)
        seen[split] = len(next(iter(mine)))
    assert seen == {False: 4, True: 2}
    assert_fires("batches_are_not_split", {"accelerator_config": {"split_batches": True}}, world=2)
