"""Imported once by the process that tried runs are forked from: it saves each of them seconds."""

import contextlib
import gc
import importlib

MODULES = (
    "tests.support.preloaded accelerate.commands.launch torch.distributed.run launch.train peft bitsandbytes "
    "tests.campaigns.legality.campaign tests.support.fsdp_on_cpu"
)
for name in MODULES.split():
    importlib.import_module(name)

# DeepSpeed's compiled optimizer: looking for it takes three seconds.
with contextlib.suppress(Exception):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)

gc.freeze()
