"""A Trainer that completes each checkpoint's manifest once all files are flushed to the disk."""

import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from accelerate.utils import gather_object
from huggingface_hub import HfApi
from transformers import Trainer

from launch.host.files import share
from launch.output import checkpoints
from recipes.mixture import title
from recipes.run import Json, RunSpec, recorded

# Variables with which the callbacks of wandb, MLflow, ClearML and DVCLive upload each checkpoint.
_UPLOADS = ("WANDB_LOG_MODEL", "HF_MLFLOW_LOG_ARTIFACTS", "CLEARML_LOG_MODEL", "HF_DVCLIVE_LOG_MODEL")
_YES = ("checkpoint", "all", "true", "yes", "1")


class CommittingTrainer(Trainer):
    """Trainer that flushes and hashes a checkpoint's files in a thread during the next steps.

    When the manifest is written, the checkpoint may be pushed to the Hub, and older checkpoints are
    deleted. A kill before then loses only the new checkpoint. The manifest records the run's
    engine and `identity`.
    """

    _saving: Future | None = None  # the thread's work on the last checkpoint
    _checkpoint: str | None = None  # the checkpoint that was saved or read last

    def __init__(self, *args, run: RunSpec, identity: Json | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.run = run  # for checkpoints and the model card
        self.identity = identity
        # Trainer would delete older checkpoints before the new one is complete. With a limit of 1,
        # Trainer would keep only the best checkpoint at the end, and that one may be damaged.
        self.limit, self.args.save_total_limit = self.args.save_total_limit, None

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        finally:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete. Raises `OSError` if the disk fails."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def flush_model(self) -> Json:
        """Flush the final model to the disk, before run.json records the run as finished.

        Returns the size and checksum of each file of the model; empty except on rank 0.
        """
        folder = Path(self.args.output_dir)
        if not self.args.should_save:
            return {}
        share(recorded.file_of(folder))
        checkpoints.flush_files([file for file in folder.iterdir() if file.is_file()])
        return checkpoints.described(folder, checkpoints.model_files(folder))

    def complete_card(self) -> None:
        """Write an adapter's README.md, if the file is still the empty template of peft."""
        file = Path(self.args.output_dir, "README.md")
        if self.run["use_peft"] and file.exists() and "[More Information Needed]" in file.read_text(encoding="utf-8"):
            self.create_model_card()

    def create_model_card(self, **about) -> None:
        """Write README.md as Trainer does, with base model, data and recipe. A push calls this."""
        run, file = self.run, Path(self.args.output_dir, "README.md")
        name = "" if run["from_scratch"] else run["model_name_or_path"] or ""
        origin = {"finetuned_from": name or None, "dataset": title(run["dataset_name"]) or None}
        super().create_model_card(**origin, **about)
        # Trainer writes "multi-GPU" on a CPU too, and links local folders to the Hub.
        local = re.escape(name) if name and Path(name).expanduser().exists() else "$."
        wrong = rf"- distributed_type: .*\n|\[({local})\]\(https://[^)]*\)"
        ending = f"\n- accelerate-recipes, recipe `{run.recipe.name}`: run.json here holds every setting\n"
        if self.is_world_process_zero():
            file.write_text(re.sub(wrong, r"\1", file.read_text(encoding="utf-8")) + ending, encoding="utf-8")

    def push_record(self) -> None:
        """Upload run.json with the results: the model was pushed before the run had ended."""
        file, name = recorded.file_of(self.args.output_dir), self.hub_model_id
        revision = self.args.hub_revision
        HfApi().upload_file(path_or_fileobj=file, path_in_repo=file.name, repo_id=name, revision=revision)

    def _save_checkpoint(self, model, trial) -> None:
        self.finish_saving()
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{step}"
        if self.args.should_save:
            if checkpoints.manifest_of(folder).get("run") != self.identity:
                checkpoints.remove([folder])  # another run's files would become part of the new checkpoint
            checkpoints.begin(folder, step, self.run.engine.title, self.args.world_size, self.identity)
        self.accelerator.wait_for_everyone()  # so that no rank writes before an old folder is removed
        super()._save_checkpoint(model, trial)
        names = self._names_on_all_nodes(folder)
        if self.args.should_save:
            thread = ThreadPoolExecutor(1, thread_name_prefix=folder.name)
            self._saving = thread.submit(_complete, folder, names, self.limit, self.state.best_model_checkpoint)
            thread.shutdown(wait=False)  # the thread ends with its work
        if self.args.push_to_hub or any(os.environ.get(name, "").lower() in _YES for name in _UPLOADS):
            self.finish_saving()  # so that a reporter's callback and the push below upload a complete checkpoint
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(folder))
        self._checkpoint = str(folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: `_save_checkpoint` pushes complete checkpoints."""

    def _names_on_all_nodes(self, folder: Path) -> list[str]:
        """Return the checkpoint's files, once all ranks have written and other nodes have flushed.

        Files on the separate disks of other nodes are left out, because rank 0 cannot read them.
        """
        self.accelerator.wait_for_everyone()
        is_first_of_node = self.args.local_process_index == 0
        if is_first_of_node and not self.args.should_save and folder.is_dir():
            checkpoints.flush_files([folder / name for name in checkpoints.listed(folder)])
        own = checkpoints.manifest_of(folder).get("begun")
        seen = gather_object([(own, checkpoints.listed(folder))] if is_first_of_node else [])
        return sorted({name for save, names in seen if save == own for name in names})

    def _finalize_training(self, *args, **kwargs):
        self.finish_saving()  # the best model may be read from the last checkpoint
        return super()._finalize_training(*args, **kwargs)


def _complete(folder: Path, names: list[str], limit: int | None, best: str | None) -> None:
    try:
        checkpoints.commit(folder, names)
    except FileNotFoundError:
        return  # the user has deleted the checkpoint meanwhile
    checkpoints.rotate(folder, limit, best)
