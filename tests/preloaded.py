"""Imported once by the process from which the tests fork ranks: what takes each of them ten seconds otherwise."""

import deepspeed  # noqa: F401
import torch.distributed  # noqa: F401

import launch.build
import launch.data
import launch.model
import launch.resume  # noqa: F401
