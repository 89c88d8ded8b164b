"""A pretend accelerator, so that a CPU can count what a GPU would have to wait for.

Its tensors keep their numbers in an ordinary CPU tensor but say that they live on another device. Every operation on
them passes through one function, which sees each way from the device to the host: ``.cpu()``, ``.to("cpu")``,
``.tolist()``, ``.item()``, ``bool(t)``, ``float(t)``, a ``copy_`` into a host tensor, ``nonzero``, a mask as an index.
``.numpy()`` fails, as on a GPU.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("lazy", 0)  # a device that torch has a name for and CPU builds do not have


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend accelerator."""

    @staticmethod
    def __new__(cls, host):
        return torch.Tensor._make_wrapper_subclass(cls, host.shape, host.stride(), dtype=host.dtype, device=DEVICE)

    def __init__(self, host):
        self.host = host

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of Accelerator()")

    def tolist(self):  # torch refuses it for subclasses
        return self.cpu().tolist()


def _on_device(device):
    return device is not None and torch.device(device).type == DEVICE.type


def _waits_for_values(func, args):
    """Whether the host must know the values to go on: a Python number comes back, or a shape depends on them."""
    if func is torch.ops.aten.index.Tensor:  # only a mask's shape does
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class _FromNumbers(TorchFunctionMode):
    """Tensors made from Python numbers: torch fills them where no dispatch mode looks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, **kwargs}
            device = device or like.device
        if func in (torch.tensor, torch.as_tensor) and _on_device(device):
            return func(*args, **{**kwargs, "device": None}).to(device)
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """While active, tensors of the accelerator can be made (``device=DEVICE``, ``.to(DEVICE)``) and used.

    Attributes:
        reads: How many numbers were brought to the host, for each time that it happened.
    """

    def __init__(self):
        super().__init__()
        self.reads = []
        self._from_numbers = _FromNumbers()

    def __enter__(self):
        self._from_numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._from_numbers.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, sources = dict(kwargs or {}), []
        device = kwargs.pop("device", None)
        host_args, host_kwargs = tree_map_only(DeviceTensor, lambda t: sources.append(t) or t.host, (args, kwargs))
        result = func(*host_args, **host_kwargs, **({} if device is None else {"device": "cpu"}))
        moved = (device is not None and not _on_device(device)) or (
            func is torch.ops.aten.copy_.default and not isinstance(args[0], DeviceTensor)
        )
        if sources and (moved or _waits_for_values(func, host_args)):
            self.reads.append(sources[-1].numel())
            if moved:
                return result
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):  # in place: the same tensor again
            return args[0] if func._schema.returns else None
        if _on_device(device) or (device is None and sources):
            return tree_map_only(torch.Tensor, DeviceTensor, result)
        return result
