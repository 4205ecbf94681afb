"""Resolves `training.attention` for a planned device, as a run there would. Imports no torch."""

from __future__ import annotations

from models.kernel_choice import problems
from trainer.config.job_config import Config
from trainer.hardware.attention_kernels import attention_choices
from trainer.hardware.device_specs import DEFAULT_DEVICE, DeviceSpec, load_device, select_device


def attention_problems(config: Config, device: DeviceSpec) -> list[str]:
    """The reasons why the device cannot run the kernel that the configuration names."""
    if config.training.attention == "auto":
        return []
    # Problems on every device are reported with the configuration, not with the device.
    of_configuration = {*problems(config.training.attention, config.attention_needs())}
    found = problems(config.training.attention, config.attention_needs(device.generation))
    return [f"{device.name}: {problem}" for problem in found if problem not in of_configuration]


def with_attention_choice(config: Config, device: DeviceSpec | None = None) -> Config:
    """The configuration with what `training.attention = "auto"` takes.

    None: the device that it is planned for.
    """
    if config.training.attention != "auto":
        return config
    device = device or select_device(config) or load_device(DEFAULT_DEVICE)
    choice = {"attention": attention_choices(config, device.generation, device.attention_flops)[0]}
    return config.model_copy(update={"training": config.training.model_copy(update=choice)})
