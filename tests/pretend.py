"""A pretend accelerator: tensors on a device of their own, whose numbers lie in the CPU's memory.

It refuses float64, as MPS does, and what CUDA refuses: an operation on tensors of two devices (a
CPU tensor of no dimension may take part in an element-wise one, and indices may lie on the CPU),
random numbers by a generator of another device, and `numpy()`. So a tensor that was forgotten on
the CPU fails on a machine without a GPU, too. PyTorch's private backend, registered from Python,
lends the device and what autograd needs of it; a tensor subclass holds the numbers.

It cannot see whether a GPU has a kernel and what that computes, what autocast casts (nothing is
cast here), streams, pinned memory, how much memory there is, and attention's fused kernels.
A refusal inside a tensor's hook ends the process, with Python's traceback, where CUDA's raises.
"""

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_aten = torch.ops.aten
# They bring a tensor from one device to another; CUDA's indices may lie on the CPU.
_ACROSS = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}
_INDEXED = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default,
}  # fmt: skip

LACKING = {torch.float64}  # as MPS lacks it: it raises where a tensor of it would be made

_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


class PretendTensor(torch.Tensor):
    """A tensor on the accelerator; `raw` has its numbers."""

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
        if func == _SET_DATA:  # the numbers go with the tensor
            args[0].raw = args[1].raw
        if func == torch.Tensor.tolist:  # not there for subclasses, but on every device
            return args[0].raw.tolist()
        with torch._C.DisableTorchFunctionSubclass():  # a result on the CPU stays what it is
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on the numbers, if every tensor is where it has to be."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode it comes whole
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
    """The tensor that has these numbers; a new one where nobody has."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype in LACKING:
        raise TypeError(f"{NAME}: the device has no {leaf.dtype}")
    return owners[id(leaf)] if id(leaf) in owners else PretendTensor(leaf)


def _raw(leaf):
    return leaf.raw if isinstance(leaf, PretendTensor) else leaf


def _leaves(tree):
    """List what is in tuples, lists and dicts; PyTorch's own takes half of a test's time."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]


def _mapped(change, tree):
    """The same tree with other leaves."""
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
    looked_at = (args[0], args[2:]) if func in _INDEXED else (args, kwargs)
    for tensor in _leaves(looked_at):
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, PretendTensor):
            continue
        if tensor.dim() == 0 and torch.Tag.pointwise in func.tags:
            continue
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found at least two, "
            f"{NAME}:0 and {tensor.device} {tuple(tensor.shape)}"
        )


class _Module:
    """What PyTorch asks of torch.cuda's counterpart."""

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

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


def register() -> torch.device:
    """Make it known to this process, for good; the device."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
        for op in (_aten.copy_.default, _aten._copy_from.default, _aten.lift_fresh.default):
            _LIBRARY.impl(op.name().removeprefix("aten::"), _kernel(op), "PrivateUse1")
        _FALLBACK.fallback(lambda op, *args, **kwargs: compute(op, args, kwargs), "PrivateUse1")
        _FALLBACK.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return torch.device(NAME)


def _kernel(op):
    return lambda *args, **kwargs: compute(op, args, kwargs)


# What is registered lives as long as these.
_LIBRARY = torch.library.Library("aten", "IMPL")
_FALLBACK = torch.library.Library("_", "IMPL")
