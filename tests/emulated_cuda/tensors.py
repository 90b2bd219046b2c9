"""Tensors on the emulated device, and what each of torch's operators does to them.

An operator is a kernel: it runs at once on the host's memory behind its tensors. It is noted with the bytes that it reads
and writes: whole tensors, but for those that look up rows, of which only the rows count, as streams share a pool of KV
blocks.
Whatever gives the host a value waits for the device; whatever mixes the host's tensors with the device's is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated_cuda.device import CudaError, Device, Span, extent, place, plain

aten: Any = torch.ops.aten

device = Device()
"""The one of this process; `runtime.install` makes torch use it."""


class DeviceTensor(torch.Tensor):
    inner: torch.Tensor
    """The same elements in the host's memory, with the same strides."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("cuda", index),
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        wait("tolist()")
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def record_stream(self, stream: Any) -> None:
        device.recorded_streams.setdefault(device.serial(self.inner), set()).add(stream.agent.number)

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, {self.device})"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.inner.data_ptr(), False), "shape": tuple(self.shape), "typestr": "|u1", "version": 3}


def tree_leaves(tree: Any) -> Iterator[Any]:
    """What the tuples, lists and dictionaries of an operator's arguments hold. torch's own functions, which know of more,
    take longer than the operators of a test."""
    if isinstance(tree, tuple | list):
        for x in tree:
            yield from tree_leaves(x)
    elif isinstance(tree, dict):
        yield from tree_leaves(list(tree.values()))
    else:
        yield tree


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple([tree_map(function, x) for x in tree])
    if isinstance(tree, list):
        return [tree_map(function, x) for x in tree]
    if isinstance(tree, dict):
        return {key: tree_map(function, x) for key, x in tree.items()}
    return function(tree)


def inner_of(x: Any) -> Any:
    return x.inner if isinstance(x, DeviceTensor) else x


def on_device(inner: torch.Tensor, index: int | None = None) -> DeviceTensor:
    """A tensor of memory that is the device's from now on."""
    device.own(inner)
    return DeviceTensor(inner, device.index if index is None else index)


def wait(what: str) -> None:
    """Waits for the current stream, as an operator of torch does."""
    device.wait(what, device.stream().clock, is_torchs=True)


def kernel(
    what: str, run: Callable[..., object], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
    spans: Callable[..., tuple[Sequence[Span], Sequence[Span]]] | None = None, **how: Any,
) -> None:  # fmt: skip
    """Launches `run(*inputs, *outputs)`, all of them in the host's memory."""
    num_inputs = len(inputs)

    def whole(*tensors: torch.Tensor) -> tuple[list[Span], list[Span]]:
        return device.spans(tensors[:num_inputs]), device.spans(tensors[num_inputs:])

    device.launch(what, run, [*inputs, *outputs], spans or whole, **how)


# ------------------------------------------------------------------------------------------------- between memories


def to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    source: torch.Tensor = args[0]
    target = torch.device(kwargs.get("device") or source.device)
    options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    with plain():
        made = func(inner_of(source), **options)
        if made is inner_of(source) or made.data_ptr() == inner_of(source).data_ptr():
            made = made.clone()
    if target.type != "cuda":
        transfer(source, made, False, bool(kwargs.get("non_blocking")))
        return made
    made = device.placed(made)
    result = on_device(made, target.index)
    transfer(source, made, True, bool(kwargs.get("non_blocking")))
    return result


def copy_into(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    with plain():
        func(inner_of(target), inner_of(source))
    transfer(source, inner_of(target), isinstance(target, DeviceTensor), non_blocking)
    return target


def transfer(source: torch.Tensor, target: torch.Tensor, goes_to_device: bool, non_blocking: bool) -> None:
    """Transfers what has been copied to `target`."""
    comes_from_device, of = isinstance(source, DeviceTensor), inner_of(source)

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    if comes_from_device == goes_to_device:
        if goes_to_device:
            kernel(f"copy {place()}", run, [of], [target], has_run=True)
        return
    on_host = target if comes_from_device else of
    is_locked = device.is_page_locked(on_host)
    if on_host.dim() == 0 and not comes_from_device:
        kernel(f"fill {place()}", run, [], [target], has_run=True)
        return
    if device.captured_here() is not None and not is_locked:
        device.forbidden("copy between pageable memory and the device")
    if non_blocking and not is_locked:
        device.report("pageable", f"a copy that should not wait is from or to pageable memory at {place()}")
    if not comes_from_device and not is_locked:
        # What is pageable is read before the call returns.
        kernel(f"copy to the device {place()}", run, [], [target], has_run=True)
    else:
        way = "to the host" if comes_from_device else "to the device"
        # torch's allocator keeps what is its own until the copy is over.
        is_recorded = device.serial(on_host) in device.page_locked
        kernel(f"copy {way} {place()}", run, [of], [target], has_run=True, is_recorded=is_recorded)
        if not comes_from_device:
            device.watch(on_host)
    if not non_blocking:
        wait("copy between host and device")


# ------------------------------------------------------------------------------------------------- rows of tensors


def rows_of(tensor: torch.Tensor, indices: torch.Tensor) -> list[Span]:
    """Rows of the first axis."""
    if not tensor.numel():
        return []
    first, step = device.span(tensor[:1]), tensor.stride(0) * tensor.itemsize
    return [
        Span(first.key, first.begin + i * step, first.end + i * step) for i in sorted(set(indices.flatten().tolist()))
    ]


def index_select(func: Any, args: Any, kwargs: Any) -> Any:
    source, axis, index = (inner_of(x) for x in args[:3])
    same_device(args[0], args[2])
    out = kwargs.get("out")
    with plain():
        found = aten.index_select.default(source, axis, index)
    if out is None:
        target = device.placed(found)
        result: Any = on_device(target)
    else:
        target, result = inner_of(out), out
        if out.shape != found.shape:
            raise CudaError("index_select: `out` has another shape and would be resized")

    def run(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(aten.index_select.default(source, axis, index))

    def spans(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> tuple[list[Span], list[Span]]:
        rows = rows_of(source, index) if axis == 0 else [device.span(source)]
        return [device.span(index), *rows], [device.span(target)]

    kernel(f"index_select {place()}", run, [source, index], [target], spans, has_run=out is None)
    return result


def index_copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, axis, index, source = args

    def run(index: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        target.index_copy_(axis, index, source)

    def spans(index: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> tuple[list[Span], list[Span]]:
        rows = rows_of(target, index) if axis == 0 else [device.span(target)]
        return device.spans([index, source]), rows

    same_device(target, index, source)
    kernel(f"index_copy_ {place()}", run, [index.inner, source.inner], [target.inner], spans)
    return target


def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    target, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    same_device(target, *given, values)
    is_given = [index is not None for index in indices]
    is_cells = len(given) == 2 and is_given == [True, True] and target.dim() == 4 and given[0].dim() == 1

    def run(values: torch.Tensor, *rest: torch.Tensor) -> None:
        found = iter(rest[:-1])
        rest[-1].index_put_([next(found) if is_one else None for is_one in is_given], values, accumulate)

    def spans(values: torch.Tensor, *rest: torch.Tensor) -> tuple[list[Span], list[Span]]:
        target = rest[-1]
        written = list(cells_of(target, rest[0], rest[1])) if is_cells else [device.span(target)]
        return device.spans([values, *rest[:-1]]), written

    kernel(f"index_put_ {place()}", run, [inner_of(values), *(inner_of(i) for i in given)], [target.inner], spans)
    return target


def cells_of(target: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> Iterator[Span]:
    """One token's heads at each place of `[blocks, block_size, heads, head_dim]`."""
    first, size = device.span(target[:1, :1, :1]), target.itemsize
    of_block, of_token, of_head = (target.stride(axis) * size for axis in range(3))
    for block, offset in zip(blocks.tolist(), offsets.tolist(), strict=True):
        for head in range(target.shape[2]):
            shift = block * of_block + offset * of_token + head * of_head
            yield Span(first.key, first.begin + shift, first.end + shift)


def same_device(*tensors: Any) -> None:
    kinds = {isinstance(t, DeviceTensor) for t in tensors if isinstance(t, torch.Tensor) and t.dim()}
    if len(kinds) > 1:
        raise CudaError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({place()})")


SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy_into,
    aten.index_select.default: index_select,
    aten.index_select.out: index_select,
    aten.index_copy_.default: index_copy,
    aten.index_put_.default: index_put,
    aten._index_put_impl_.default: index_put,
}
NOTHING_WRITTEN = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    ours = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    named = kwargs.get("device")
    is_ours = bool(ours) or (named is not None and torch.device(named).type == "cuda")
    if not is_ours:
        return on_host(func, args, kwargs)
    if func in SPECIAL:
        return SPECIAL[func](func, args, kwargs)
    if named is not None and torch.device(named).type not in ("cuda", "cpu"):
        return func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))  # only its shape is wanted
    return operator(func, args, kwargs, ours)


def on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator of the host's tensors, some of which the device may be using."""
    is_locked = kwargs.pop("pin_memory", False) or func is aten._pin_memory.default
    if (device.page_locked or device.registered) and not _is_view(func):
        for x in tree_leaves((args, kwargs)):
            is_host = isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.numel()
            if is_host and device.is_tracked(x):
                device.touched_by_host(x, _is_written(func, args, kwargs, x))
    with plain():
        result = args[0].clone() if func is aten._pin_memory.default else func(*args, **kwargs)
    if is_locked:
        if device.captured_here() is not None:
            device.forbidden("allocation of page-locked memory")
        device.unsafe("allocation of page-locked memory")
        with device.lock:
            device.page_locked.add(device.serial(result))
    return result


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether the operation is a view of its argument, which reads nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _is_written(func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> bool:
    return any(tensor is written for written in _written(func, args, kwargs))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operator's schema says it changes."""
    found: list[torch.Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return found


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


POISON = 0xFF
"""Bytes of memory to which nothing was written: NaN in every floating type."""
MAX_POISONED_BYTES = 1 << 20
"""Most bytes of a tensor that is poisoned: large ones would take more time than they show."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    with plain():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def operator(func: Any, args: Any, kwargs: Any, ours: Sequence[DeviceTensor]) -> Any:
    """Any other, of the device's tensors or into its memory."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if ours and any(not isinstance(x, DeviceTensor) and x.dim() for x in tensors):
        raise CudaError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func} at {place()})"
        )
    index = ours[0].device.index if ours else torch.device(kwargs["device"]).index
    inner_args = tree_map(inner_of, args)
    inner_kwargs = {k: inner_of(v) for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    if "device" in kwargs:
        inner_kwargs["device"] = "cpu"
    if WAITS & set(func.tags) or func in (aten.equal.default, aten.is_nonzero.default):
        wait(str(func))
    with plain():
        result = func(*inner_args, **inner_kwargs)
    written = _written(func, inner_args, inner_kwargs)
    inputs = [x.inner for x in ours]
    before = {id(x.inner): x for x in ours}
    storages = {device.serial(x) for x in inputs}
    if func in NOTHING_WRITTEN:
        for x in tree_leaves(result):
            if x.nbytes <= MAX_POISONED_BYTES:
                as_bytes(x).fill_(POISON)
    fresh: list[torch.Tensor] = []

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in before:
            known = before[id(x)]
            if known.shape != x.shape or known.stride() != x.stride():
                raise NotImplementedError(f"{func} changes the shape of a tensor in place")
            return known
        if device.serial(x) in storages:
            return DeviceTensor(x, index if index is not None else device.index)
        fresh.append(device.placed(x))
        return on_device(fresh[-1], index)

    made = tree_map(wrapped, result)
    if (written or fresh) and func not in NOTHING_WRITTEN:
        _note(func, inner_args, inner_kwargs, inputs, written, fresh)
    return made


def _note(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """The operator, which has run, as a kernel that can be replayed."""
    tensors, again = repeatable(func, args, kwargs)
    changed = {i for i, x in enumerate(tensors) if any(x is y for y in written)}
    count, num_outs = len(tensors), len(fresh)

    def run(*given: torch.Tensor) -> None:
        made = [x for x in tree_leaves(again(*given[:count])) if isinstance(x, torch.Tensor)]
        for out, new in zip(given[count:], made[-num_outs:] if num_outs else [], strict=True):
            out.copy_(new)

    def spans(*given: torch.Tensor) -> tuple[list[Span], list[Span]]:
        reads = [x for i, x in enumerate(given[:count]) if i not in changed and x.dim()]
        writes = [given[i] for i in changed] + list(given[count:])
        return device.spans(reads), device.spans(writes)

    what = f"{func.__name__.partition('.')[0]} {place()}"
    device.launch(what, run, [*tensors, *fresh], spans, has_run=True)


def repeatable(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """The tensors among the arguments, in the host's memory, and a function that calls `func` with others in their places.
    It keeps none of them: a graph must not keep what it was captured with."""
    tensors = [inner_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    form = tree_map(lambda x: _TENSOR if isinstance(x, torch.Tensor) else x, (args, kwargs))

    def again(*given: torch.Tensor) -> Any:
        rest = iter(given)
        again_args, again_kwargs = tree_map(lambda x: next(rest) if x is _TENSOR else x, form)
        return func(*again_args, **again_kwargs)

    return tensors, again


_TENSOR = object()
"""Stands for each tensor in the arguments that a graph keeps."""


# ------------------------------------------------------------------------------------------------- whole functions


FUSED = {F.scaled_dot_product_attention, F.rms_norm, F.linear, F.grouped_mm, torch.rms_norm}
"""One kernel each on a device, where torch on the host makes several operators of them."""


INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
MADE_ON_HOST = {torch.tensor, torch.as_tensor}
"""Operations on the host's values, which are then copied."""


def _index_on_device(index: Any) -> Any:
    """What the host has is copied first, and waited for."""
    if isinstance(index, list | np.ndarray):
        index = torch.as_tensor(index)
    return index.to("cuda") if isinstance(index, torch.Tensor) and index.dim() else index


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUSED and any(isinstance(x, DeviceTensor) for x in tree_leaves((args, kwargs))):
            return fused(func, args, kwargs)
        if func in MADE_ON_HOST and _is_cuda(kwargs.get("device")):
            target = kwargs.pop("device")
            with plain():
                made = func(*args, **kwargs)
            return made.to(target)
        if func in INDEXED and isinstance(args[0], DeviceTensor):
            args = (
                args[0],
                tree_map(_index_on_device, args[1]) if isinstance(args[1], tuple) else _index_on_device(args[1]),
                *args[2:],
            )
        if func is torch.Tensor.is_pinned:
            return not isinstance(args[0], DeviceTensor) and device.is_page_locked(args[0])
        if func is torch.Tensor.pin_memory:
            return dispatch(aten._pin_memory.default, args, {})
        if func in (torch.Tensor.numpy, torch.Tensor.tolist) and not isinstance(args[0], DeviceTensor):
            device.touched_by_host(args[0], False)
        return func(*args, **kwargs)


def fused(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    same_device(*(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)))
    if func is F.scaled_dot_product_attention:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if mask is not None and kwargs.get("enable_gqa"):
            device.report("attention", f"a mask with enable_gqa leaves no fused kernel but cuDNN's ({place()})")
    ours = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    inner_args, inner_kwargs = tree_map(inner_of, (args, kwargs))
    with plain():
        made = func(*inner_args, **inner_kwargs)
    made = device.placed(made.clone() if device.serial(made) in {device.serial(x.inner) for x in ours} else made)
    result = on_device(made, ours[0].device.index)
    tensors, again = repeatable(func, args, kwargs)

    def run(*given: torch.Tensor) -> None:
        given[-1].copy_(again(*given[:-1]))

    kernel(f"{func.__name__} {place()}", run, tensors, [made], has_run=True)
    return result


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain().in_mode():
            return dispatch(func, args, dict(kwargs or {}))


__all__ = ["DeviceTensor", "DispatchMode", "FunctionMode", "device", "extent", "inner_of", "kernel", "on_device"]
