"""Settings, keys and values that the installed libraries accept."""

from recipes.legal.schema import (
    ALIASES,
    Field,
    accelerate_nested_keys,
    names,
    run_flags,
    settings,
    trainer_fields,
    version,
)
