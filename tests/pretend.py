"""A pretend accelerator: its tensors have a device of their own, with data in the CPU's memory.

It rejects float64, as MPS does, and what CUDA rejects: an operation on tensors of two devices (a
0-dimensional CPU tensor may take part in an element-wise one, and indices may be on the CPU),
random numbers by a generator of another device, and `numpy()`. So a tensor that was forgotten on
the CPU is an error on a machine without a GPU, too. PyTorch's private backend, registered from
Python, provides the device and autograd's hooks; a tensor subclass holds the data.

It does not cover the kernels of a GPU and their results, autocast (nothing is cast here), streams,
pinned memory, the size of the memory, and attention's fused kernels. An error inside a tensor's
hook ends the process with Python's traceback, where CUDA's raises.
"""

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_aten = torch.ops.aten
# Operations that copy between devices, and operations whose indices may be on the CPU.
_ACROSS = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}
_INDEXED = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default,
}  # fmt: skip

LACKING = {torch.float64}  # as MPS lacks it: making such a tensor raises

_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


class PretendTensor(torch.Tensor):
    """A tensor on the accelerator; `raw` has its data."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, raw):
        self.raw = raw

    def __repr__(self):  # type: ignore[override]
        return f"PretendTensor({self.raw!r})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == _SET_DATA:  # moves the data as well
            args[0].raw = args[1].raw
        if func == torch.Tensor.tolist:  # subclasses lack it
            return args[0].raw.tolist()
        with torch._C.DisableTorchFunctionSubclass():  # a result on the CPU is not wrapped
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on the data, after a check of the tensors' devices."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # inference mode does not decompose it
    _check_devices(func, args, kwargs)
    target = kwargs.get("device")
    tensors = [t for t in _leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    on_cpu = target is not None and torch.device(target).type == "cpu"
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    owners = {id(t.raw): t for t in tensors if isinstance(t, PretendTensor)}
    plain_args, plain_kwargs = _mapped(_raw, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if on_cpu or (func is _aten.copy_.default and not isinstance(args[0], PretendTensor)):
        return result if on_cpu else args[0]
    with torch.inference_mode(False):  # in which tensors of a subclass cannot be viewed
        return _mapped(lambda leaf: _owned(leaf, owners), result)


def _owned(leaf, owners):
    """Return the tensor with this data; a new one if there is none."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype in LACKING:
        raise TypeError(f"{NAME}: the device has no {leaf.dtype}")
    return owners[id(leaf)] if id(leaf) in owners else PretendTensor(leaf)


def _raw(leaf):
    return leaf.raw if isinstance(leaf, PretendTensor) else leaf


def _leaves(tree):
    """List the leaves of tuples, lists and dicts; PyTorch's own takes half of a test's time."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]


def _mapped(change, tree):
    """Return the tree with changed leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(change, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [_mapped(change, branch) for branch in tree]
        return type(tree)(branches)
    return change(tree)


def _check_devices(func, args, kwargs):
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{func}: expected a {NAME!r} generator, but found 'cpu'")
    if func in _ACROSS:
        return
    checked = (args[0], args[2:]) if func in _INDEXED else (args, kwargs)
    for tensor in _leaves(checked):
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, PretendTensor):
            continue
        if tensor.dim() == 0 and torch.Tag.pointwise in func.tags:
            continue
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found at least two, "
            f"{NAME}:0 and {tensor.device} {tuple(tensor.shape)}"
        )


class _Module:
    """The functions that PyTorch calls in a backend's module, as torch.cuda."""

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_rng_state(self, device):
        return torch.get_rng_state()  # numbers of this device are drawn on the CPU

    def set_rng_state(self, state, device):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def register() -> torch.device:
    """Register the device in this process, for good; return it."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
        for op in (_aten.copy_.default, _aten._copy_from.default, _aten.lift_fresh.default):
            _LIBRARY.impl(op.name().removeprefix("aten::"), _kernel(op), "PrivateUse1")
        _FALLBACK.fallback(lambda op, *args, **kwargs: compute(op, args, kwargs), "PrivateUse1")
        _FALLBACK.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return torch.device(NAME)


def _kernel(op):
    return lambda *args, **kwargs: compute(op, args, kwargs)


# Registrations last as long as these objects.
_LIBRARY = torch.library.Library("aten", "IMPL")
_FALLBACK = torch.library.Library("_", "IMPL")
