"""Triton's interpreter without what it does again and again: half of the time of tests that run kernels, and more."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import ModuleType
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Have the interpreter, of the module `triton.runtime.interpreter`, do once what it needs once."""
    remember_builtins(interpreter)
    patch_once(interpreter)
    remember_types(interpreter)
    compare_shapes_as_numbers(interpreter)
    skip_what_changes_nothing(interpreter)


def remember_builtins(interpreter: ModuleType) -> None:
    """Have Triton's interpreter look once for the names that it replaces in `triton.language`.

    It looks through all members of its modules at each launch of a kernel, and at each call of a function within one,
    which takes a third of the time of tests that run kernels.
    """
    is_builtin = interpreter.tl.core.is_builtin
    names: dict[Any, list[str]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch  # type: ignore[attr-defined]


def patch_once(interpreter: ModuleType) -> None:
    """Have Triton's interpreter replace names of `triton.language` once for a launch, not at each call within it."""
    patch_lang, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    languages: dict[Any, set[ModuleType]] = {}
    replaced: set[ModuleType] = set()

    def patch(fn: Any) -> Any:
        if fn not in languages:
            languages[fn] = {value for value in fn.__globals__.values() if any(value is module for module in modules)}
        if languages[fn] <= replaced:
            return interpreter._LangPatchScope()  # a call within a launch: nothing is left to replace, or to restore
        scope, is_launch = patch_lang(fn), not replaced
        replaced.update(languages[fn])
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch  # type: ignore[attr-defined]


def compare_shapes_as_numbers(interpreter: ModuleType) -> None:
    """Have Triton's interpreter compare shapes by their numbers, of which it would make an object each, three times.

    Nothing is broadcast where two shapes are the same, which is so for most operations; `remember_types` has made them
    one object then.
    """
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    constexpr, equal, broadcast = core.constexpr, core.tuple.__eq__, semantic.broadcast_impl_value

    def numbers(values: Any) -> list[Any] | None:
        found = [value.value if isinstance(value, constexpr) else value for value in values]
        return found if all(type(value) is int for value in found) else None

    same = constexpr(True)

    def compare(self: Any, other: Any) -> Any:
        if self is other:
            return same
        if isinstance(other, (list, core.tuple)):
            mine, theirs = numbers(self), numbers(other)
            if mine is not None and theirs is not None:
                return constexpr(mine == theirs)
        return equal(self, other)

    def broadcast_where_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        one, two = lhs.type, rhs.type
        if one.is_block() and two.is_block():
            if one.shape is two.shape:
                return lhs, rhs
            dims = numbers(one.shape)
            if dims is not None and dims == numbers(two.shape):
                return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.tuple.__eq__, semantic.broadcast_impl_value = compare, broadcast_where_needed


def remember_types(interpreter: ModuleType) -> None:
    """Have Triton's interpreter make a type, and the shape of a tensor, once instead of with each operation.

    Nor need it compute, for each addition, whether the result overflows: without `debug` nobody looks at what it finds.
    Together that is half of the time of tests that run kernels.
    """
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    find_dtype, constexpr, make_base = interpreter._get_np_dtype, core.constexpr, core.base_value.__init__
    of_shape, of_sizes, of_name, of_block, make_block = {}, {}, {}, {}, core.block_type.__init__

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in of_name:
            of_name[scalar.name] = find_dtype(scalar)
        return of_name[scalar.name]

    def unwrap(shape: Any) -> list[Any]:
        shape = core._unwrap_if_constexpr(shape) if isinstance(shape, constexpr) else shape
        return [size.value if isinstance(size, constexpr) else size for size in shape]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *unwrap(shape)
        if key not in of_block:
            make_block(self, element_ty, shape)
            of_block[key] = of_sizes.setdefault(key[1:], self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = of_block[key]

    def make_tensor(self: Any, handle: Any, dtype: Any) -> None:
        make_base(self)
        shape = dtype.shape if dtype.is_block() else ()
        if id(shape) not in of_shape:  # which keeps it, so that no other gets its place in memory
            of_shape[id(shape)] = constexpr(math.prod(shape)), core.tuple([constexpr(size) for size in shape]), shape
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.numel, self.shape, _ = of_shape[id(shape)]

    interpreter._get_np_dtype = numpy_dtype  # type: ignore[attr-defined]
    core._unwrap_shape, core.tensor.__init__, core.block_type.__init__ = unwrap, make_tensor, block_type


def skip_what_changes_nothing(interpreter: ModuleType) -> None:
    """Have Triton's interpreter not look for the common type of two tensors that have one type, or of one and a number.

    Nor for what is to be taken out of a tensor, nor whether what numpy has computed fits its own type; and no argument
    of an operator is copied to name one more.
    """
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    tensor, dtype, block_type, constexpr = core.tensor, core.dtype, core.block_type, core.constexpr
    types, unwrap, full = semantic.binary_op_type_checking_impl, core._unwrap_if_constexpr, interpreter.np.full
    handle, known = interpreter.TensorHandle, interpreter.interpreter_semantic
    plain = {tensor, int, float, bool, str, type(None), dtype, block_type}

    def unwrap_what_can_be(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is constexpr else unwrap(value)

    def is_same(self: Any, other: Any) -> bool:
        other = unwrap_what_can_be(other)
        return self is other or (isinstance(other, dtype) and self.name == other.name)

    def becomes(number: Any, kind: Any) -> bool:
        if type(number) is int:
            return kind.name in ("int32", "int64", "fp32") and -(2**31) <= number < 2**31
        return type(number) is float and kind.name == "fp32"

    def common_types(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if not args[3:] and not kwargs.get("div_or_mod"):  # others may be computed in another type
            one, two = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
            if type(one) is dtype and type(two) is dtype and one.name == two.name:
                return self.broadcast_impl_value(lhs, rhs)
            if type(one) is dtype and becomes(rhs, one):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, one))
            if type(two) is dtype and becomes(lhs, two):
                return self.broadcast_impl_value(self.scalar_constant(lhs, two), rhs)
        return types(self, lhs, rhs, *args, **kwargs)

    def splat(self: Any, kind: Any, arg: Any) -> Any:
        return handle(full(kind.shape, arg.data, dtype=arg.data.dtype), arg.dtype.scalar)

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = known
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, called)

    core._unwrap_if_constexpr, dtype.__eq__, interpreter._patch_attr = unwrap_what_can_be, is_same, patch_attribute
    semantic.binary_op_type_checking_impl = common_types
    type(interpreter.interpreter_builder).create_splat = splat
    handle.__post_init__ = lambda self: None
