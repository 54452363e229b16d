"""LoRA of PEFT on linears that agmm serves.

    from agmm.integrations import peft as by_agmm

    by_agmm.enable()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"]))

The linears are agmm's layers, ``torch.nn.Linear`` with one of agmm's parallel styles, or those of a
model of transformers that `agmm.integrations.transformers` serves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from agmm.integrations.clients import Client, Replaced

__all__ = ["disable", "enable", "is_enabled"]

_CLIENT = Client("peft", (0, 21), (0, 21), "0.21.2")
_NAMES = ("_create_new_module", "_get_adapter_state_dict")

_replaced = Replaced()


def _tuner() -> Any:
    """PEFT's class of models with LoRA.

    Raises:
        InvalidArgument: peft is missing, or of a version that is not known to work.
    """
    _CLIENT.check()
    from peft.tuners.lora.model import LoraModel

    return LoraModel


def enable() -> None:
    """Makes PEFT find the linears that agmm serves, for every adapter that is added from now on.

    Beside a linear that the ranks share by columns, ``lora_A`` is whole on every rank and
    ``lora_B`` is sharded like the linear; beside one that they share by rows, ``lora_A`` is sharded
    along its input and ``lora_B`` is whole. All of them are DTensors whose gradients are those of
    the unsharded model. Adapters are saved as the unsharded model has them: each rank calls
    ``save_pretrained``, one of them with ``is_main_process=True``.

    Raises:
        InvalidArgument: peft is missing, or of a version that is not known to work.
    """
    tuner = _tuner()
    if _replaced:
        return
    from agmm.integrations import peft_lora

    _replaced.keep((name, tuner.__dict__[name]) for name in _NAMES)
    create = tuner._create_new_module
    state_dict = _replaced["_get_adapter_state_dict"].__func__

    def created(config: Any, adapter_name: str, target: Any, **options: Any) -> Any:
        if options.get("parameter_name") is None and peft_lora.is_served(target):
            return peft_lora.Linear(target, adapter_name, config=config, **options)
        return create(config, adapter_name, target, **options)

    def whole_state_dict(cls: Any, model: Any, *args: Any, **options: Any) -> Any:
        return peft_lora.made_whole(model, state_dict(cls, model, *args, **options))

    tuner._create_new_module = staticmethod(created)
    tuner._get_adapter_state_dict = classmethod(whole_state_dict)


def disable() -> None:
    """Gives PEFT its own methods back. Adapters that were added stay as they are."""
    if _replaced:
        _replaced.give_back(partial(setattr, _tuner()))


def is_enabled() -> bool:
    """Whether agmm serves adapters that are added now."""
    return bool(_replaced)
