from __future__ import annotations

import errno
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybatch.core.oom import NothingHeld, forget, out_of_memory, release

YES: list[BaseException] = [
    torch.OutOfMemoryError("anything"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a memory object"),
    RuntimeError("could not create a primitive"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN: not enough workspace"),
]
NO: list[BaseException] = [
    RuntimeError("could not create a primitive descriptor for a convolution"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("not enough workspace"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("unsupported operation: more than one element refers to a single memory location"),
    ValueError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", YES, ids=repr)
def test_memory_ran_out(error: BaseException) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize("error", NO, ids=repr)
def test_something_else_went_wrong(error: BaseException) -> None:
    assert not out_of_memory(error)


def wrapped(raising: Callable[[Exception], None]) -> Exception:
    try:
        try:
            raise MemoryError
        except MemoryError as error:
            raising(error)
    except ValueError as error:
        return error
    raise AssertionError


def with_cause(error: Exception) -> None:
    raise ValueError("a layer failed") from error


def with_context(_: Exception) -> None:
    raise ValueError("a layer failed")


def without_either(_: Exception) -> None:
    raise ValueError("a layer failed") from None


@pytest.mark.parametrize("raising", [with_cause, with_context, without_either])
def test_what_led_to_an_error_counts(raising: Callable[[Exception], None]) -> None:
    assert out_of_memory(wrapped(raising))


def without_cause() -> None:
    raise ValueError("a layer failed")


def test_what_was_handled_before_does_not_count() -> None:
    try:
        raise MemoryError
    except MemoryError as outside:
        with pytest.raises(ValueError, match="a layer failed") as raised:
            without_cause()
        found = [out_of_memory(raised.value, outside=o) for o in (outside, None)]
    assert found == [False, True]


def test_a_circle_of_causes_ends() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__context__ = other, one
    assert not out_of_memory(one)


def failing(references: list[weakref.ref[Tensor]]) -> None:
    big = torch.ones(3)
    references.append(weakref.ref(big))
    try:
        inner(references)
    except MemoryError as error:
        raise RuntimeError("a layer failed") from error


def inner(references: list[weakref.ref[Tensor]]) -> None:
    big = torch.ones(3)
    references.append(weakref.ref(big))
    raise MemoryError


def caught(references: list[weakref.ref[Tensor]]) -> Exception:
    try:
        failing(references)
    except RuntimeError as error:
        return error
    raise AssertionError


def alive(references: list[weakref.ref[Tensor]]) -> int:
    return sum(ref() is not None for ref in references)


def test_a_released_error_says_where_and_holds_nothing() -> None:
    references: list[weakref.ref[Tensor]] = []
    error = caught(references)
    assert alive(references) == 2
    release(error)
    assert alive(references) == 0
    assert error.__traceback__ is not None


def test_a_forgotten_error_holds_no_frame() -> None:
    error = caught([])
    forget(error)
    assert error.__traceback__ is None
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None


def test_an_error_from_outside_keeps_its_frames() -> None:
    references: list[weakref.ref[Tensor]] = []
    outside = caught(references)
    error = ValueError()
    error.__context__ = outside
    forget(error, outside=outside)
    assert outside.__traceback__ is not None
    assert alive(references) == 2


def test_only_an_error_for_memory_leaves_the_context_empty() -> None:
    outside = sys.exception()  # signals at every line may leave one to the tests that come later
    references: list[weakref.ref[Tensor]] = []
    with pytest.raises(RuntimeError) as raised, NothingHeld():
        failing(references)
    assert alive(references) == 0
    assert raised.value.__traceback__ is not None
    references.clear()

    def other() -> None:
        big = torch.ones(3)
        references.append(weakref.ref(big))
        raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault") as raised_too, NothingHeld():
        other()
    assert raised_too.value.__traceback__ is not None
    assert alive(references) == 1, "a debugger needs what other errors hold"
    assert sys.exception() is outside
