"""Settings, keys and values that the installed libraries accept."""

from recipes.legal.schema import (
    ALIASES,
    Field,
    model_class,
    names,
    run_flags,
    settings,
    trainer_fields,
    types_with_fused_loss,
    version,
)
