"""Each op, registered with torch once: a schema, and which form computes it where.

    CPU    the native form where it takes the tensors, else the twin;
           the CUDA source in the emulator, where that is asked for (SPINDLE_EMULATE=1)
    CUDA   the source that nvcc has compiled where it takes the tensors, else the twin
    Meta   the twin, which on tensors without data finds shapes and dtypes

So to torch each is one op, whatever computes it: a dispatch mode sees it, fake tensors go through
it, a CUDA graph captures it. An `(a!)` in a schema names what is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from spindle.kernels import cuda, emulate, native, twins

SCHEMAS = {
    "linear": "(Tensor x, Tensor panels, Tensor? bias, int outputs) -> Tensor",
    "int8_linear": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    "layer_norm": "(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    "add_layer_norm": (
        "(Tensor x, Tensor(a!) residual, Tensor weight, Tensor bias, float eps) -> Tensor"
    ),
    "rope": "(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()",
    "silu_mul": "(Tensor gate_up) -> Tensor",
    "gelu_tanh": "(Tensor x) -> Tensor",
    "write_kv": "(Tensor(a!) cache, Tensor slots, Tensor new) -> ()",
    "copy_blocks": "(Tensor(a!) cache, Tensor source, Tensor target) -> ()",
    "paged_attend": (
        "(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor lengths, float scale)"
        " -> Tensor"
    ),
}

PRODUCTS = ("linear", "int8_linear")  # no CUDA source: `kernels.linear` says what does their work
FOR_GPT2 = ("layer_norm", "add_layer_norm", "gelu_tanh")  # nor here: a GPU has the twins
ADDING = ("add_rms_norm", "add_layer_norm")  # whose twins return the residual too

Form = Callable[..., Any]


# --- on a CPU, without the emulator: native, or the twin -----------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if _native(x) and _is_weight(weight, x):
        return native.rms_norm(x.contiguous(), None, weight, eps)
    return twins.rms_norm(x, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if _native(x) and _is_residual(residual, x) and _is_weight(weight, x):
        return native.rms_norm(x.contiguous(), residual, weight, eps), residual
    return twins.add_rms_norm(x, residual, weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if _native(x) and _is_weight(weight, x) and _is_weight(bias, x):
        return native.layer_norm(x.contiguous(), None, weight, bias, eps)
    return twins.layer_norm(x, weight, bias, eps)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    both = _is_weight(weight, x) and _is_weight(bias, x)
    if _native(x) and both and _is_residual(residual, x):
        return native.layer_norm(x.contiguous(), residual, weight, bias, eps), residual
    return twins.add_layer_norm(x, residual, weight, bias, eps)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if _native(q) and _are_turned(q, k, cos, sin):
        native.rope(q, k, cos.contiguous(), sin.contiguous())
    else:
        twins.rope(q, k, cos, sin)


def _silu_mul(gate_up: Tensor) -> Tensor:
    if _native(gate_up) and gate_up.shape[1] % 2 == 0:
        return native.silu_mul(gate_up.contiguous())
    return twins.silu_mul(gate_up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return native.gelu_tanh(x.contiguous()) if _native(x) and x.ndim == 2 else twins.gelu_tanh(x)


def _write_kv(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    if _native(new) and _is_written(cache, slots, new):
        native.write_kv(cache, slots, new)
    else:
        twins.write_kv(cache, slots, new)


def _is_written(cache: Tensor, slots: Tensor, new: Tensor) -> bool:
    """Whether each row of new lies whole, and goes into a cache that does."""
    same = cache.dtype == new.dtype and cache.shape[2:] == new.shape[1:] and cache.is_contiguous()
    whole = new.stride()[1:] == (new.shape[2], 1)
    rows = slots.dtype == torch.int64 and slots.shape == new.shape[:1] and slots.is_contiguous()
    return same and whole and rows


def _paged_attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    if _native(q):
        _check_paged(q, keys, values, tables, lengths)
        q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()  # its rows may lie apart
        keys, values, tables = (x.contiguous() for x in (keys, values, tables))
        return native.paged_attend(q, keys, values, tables, lengths.contiguous(), scale)
    return twins.paged_attend(q, keys, values, tables, lengths, scale)


def _check_paged(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor) -> None:
    """TypeError for what native code would read wrongly; the ids in a table are the caller's."""
    same = keys.shape == values.shape and keys.dtype == values.dtype == q.dtype
    heads = q.shape[2] == keys.shape[3] and q.shape[1] % keys.shape[2] == 0
    rows = len(tables) == len(lengths) and tables.dtype == lengths.dtype == torch.int64
    whole = len(q) % len(tables) == 0 if len(tables) else len(q) == 0
    if not (same and heads and rows and whole):
        shapes = [f"{x.dtype} {list(x.shape)}" for x in (q, keys, values, tables, lengths)]
        raise TypeError(f"paged_attend: {', '.join(shapes)} do not go together")


def normed(add: Callable[..., tuple[Tensor, Tensor]]) -> Form:
    """Without the residual: an op may not return what it was given."""
    return lambda *arguments: add(*arguments)[0]


PLAIN: dict[str, Form] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": normed(_add_rms_norm),
    "layer_norm": _layer_norm,
    "add_layer_norm": normed(_add_layer_norm),
    "rope": _rope,
    "silu_mul": _silu_mul,
    "gelu_tanh": _gelu_tanh,
    "write_kv": _write_kv,
    "paged_attend": _paged_attend,
}


def _native(x: Tensor) -> bool:
    """`native.takes` for what is known to be on a CPU."""
    return x.dtype == torch.float32 and native.available()


def _is_weight(weight: Tensor, x: Tensor) -> bool:
    """Whether this is a row of x's width: native code reads it as such."""
    return weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous()


def _is_residual(residual: Tensor, x: Tensor) -> bool:
    return residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()


def _are_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these go together in float32, with heads that lie whole."""
    T, _, D = q.shape
    same = q.dtype == k.dtype == cos.dtype == sin.dtype and k.shape[::2] == (T, D)
    return same and cos.shape == sin.shape == (T, D / 2) and q.stride(2) == k.stride(2) == 1


# --- the registration ----------------------------------------------------------------------------


def _on_cpu(source: Form, plain: Form) -> Form:
    """The emulated source where it is asked for and takes the tensors, else the plain form."""

    def op(*arguments: Any) -> Any:
        if emulate.enabled():
            try:
                return source(*arguments)
            except cuda.Unfit:
                pass
            except OSError as cause:  # of the compiler, before anything was run
                emulate.give_up(cause)
        return plain(*arguments)

    return op


def _on_cuda(source: Form, twin: Form) -> Form:
    """The compiled source where there is one and it takes the tensors, else the twin."""

    def op(*arguments: Any) -> Any:
        if cuda.compiled(arguments[0].device) is not None:
            try:
                return source(*arguments)
            except cuda.Unfit:
                pass
        return twin(*arguments)

    return op


def _register(library: Library) -> None:
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        if name in FOR_GPT2:
            library.impl(name, PLAIN[name], "CPU")
            library.impl(name, _op(twins, name), "CUDA")
            library.impl(name, _op(twins, name), "Meta")
        elif name not in PRODUCTS:
            source, twin = _op(cuda, name), _op(twins, name)
            library.impl(name, _on_cpu(source, PLAIN.get(name, twin)), "CPU")
            library.impl(name, _on_cuda(source, twin), "CUDA")
            library.impl(name, twin, "Meta")


def _op(forms: ModuleType, name: str) -> Form:
    form = getattr(forms, name)
    return normed(form) if name in ADDING else form


def _register_products(library: Library) -> None:
    library.impl("linear", native.linear, "CPU")
    library.impl("linear", lambda x, panels, bias, outputs: _room(x, outputs), "Meta")
    library.impl("int8_linear", _int8_linear, "CPU")
    library.impl("int8_linear", twins.int8_linear, "CUDA")
    library.impl("int8_linear", lambda x, weight, scale, bias: _room(x, len(scale)), "Meta")


def _int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """In panels [ceil(N / 32), K, 32] if the native form is to read them, else [N, K]."""
    form = native.int8_linear if weight.ndim == 3 else twins.int8_linear
    return form(x, weight, scale, bias)


def _room(x: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


_library = Library("spindle", "DEF")  # the ops are gone when it is
_register(_library)
_register_products(_library)


# --- attention of a prompt, which torch has an op for --------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """`twins.attend` by torch's fused attention, which makes no scores in memory where it can.

    Keys and values serve their group of query heads without being copied where torch allows it.
    """
    (T, H, _), (S, Hk, _) = q.shape, k.shape
    hidden_some = T > 1  # a single query is the last token: it sees all keys
    mask = None
    if hidden_some and start > 0:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(start)
    heads, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H or Hk, T or S, D]
    out = F.scaled_dot_product_attention(
        heads,
        keys,
        values,
        attn_mask=mask,
        is_causal=hidden_some and mask is None,
        scale=scale,
        enable_gqa=H != Hk,
    )
    return out[0].transpose(0, 1)  # [T, H, D]
