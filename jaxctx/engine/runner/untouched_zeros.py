"""Zeros for which the system gives memory only once they are used, so that a start on a CPU clears no pages.

XLA writes every byte of its zeros, which takes a CPU half a second for each GiB of KV, most of it for the system to
find the memory. Here XLA allocates an array that nothing writes to, and the system is told that what is in it is not
needed: on Linux it reads as zeros then, and has no memory. A buffer made elsewhere would not do, as XLA copies what it
does not own before it updates it in place.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp

LEAST_BYTES = 1 << 24  # smaller arrays are cleared in milliseconds
PART_BYTES = 1 << 26  # that `take_memory` asks for at a time
MADV_POPULATE_WRITE = 23  # Linux 5.14; the module `mmap` does not have it
TARGET = "jaxctx_write_nothing"
METADATA_EXTENSION = 1


class _Version(ctypes.Structure):
    """`XLA_FFI_Api_Version` of XLA's `c_api.h`, as all that follow."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    """The start of `XLA_FFI_Metadata`."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version))


class _MetadataExtension(ctypes.Structure):
    """`XLA_FFI_Metadata_Extension`, whose first part every extension has."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Api(ctypes.Structure):
    """The start of `XLA_FFI_Api`."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("version", _Version))


class _CallFrame(ctypes.Structure):
    """The start of `XLA_FFI_CallFrame`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.POINTER(_MetadataExtension)),
        ("api", ctypes.POINTER(_Api)),
    )


def _write_nothing(call_frame: "ctypes._Pointer[_CallFrame]") -> None:
    """A function for XLA to call that leaves its output as it was allocated. XLA first asks which version it is for."""
    frame = call_frame.contents
    if frame.extensions and frame.extensions.contents.type == METADATA_EXTENSION:
        ours, theirs = frame.extensions.contents.metadata.contents.version, frame.api.contents.version
        ours.major, ours.minor = theirs.major, theirs.minor


_WRITE_NOTHING = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))(_write_nothing)


def untouched_zeros(described: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of this shape, type and sharding, for one CPU on Linux without memory; elsewhere as `jnp.zeros` makes them.

    Takes memory part by part, as the array is first written to.
    """
    size = described.size * described.dtype.itemsize
    madvise = _madvise()
    if size >= LEAST_BYTES and _is_one_cpu(described) and madvise is not None:
        array = _allocated(described)
        start = array.unsafe_buffer_pointer()
        end = start + size
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(first, last - first, mmap.MADV_DONTNEED) == 0:  # else it is locked into memory
            ctypes.memset(start, 0, first - start)
            ctypes.memset(last, 0, end - last)
            return array
        array.delete()
    return jnp.zeros(described.shape, described.dtype, device=described.sharding)


def untouched_memory(array: jax.Array) -> range:
    """The addresses of an array of `untouched_zeros` for which memory is still to be taken; none where there are none.

    An array that is updated in place keeps them.
    """
    if array.nbytes < LEAST_BYTES or not _is_one_cpu(array) or _madvise() is None:
        return range(0)
    start = array.unsafe_buffer_pointer()
    return range(start, start + array.nbytes)


def take_memory(addresses: range) -> Iterator[None]:
    """Have the system give memory to these addresses, a part with each turn of the iteration.

    Any thread may do so while the array is used: no content changes. Ends early where the system cannot do it.
    """
    madvise = _madvise()
    for start in range(addresses.start // mmap.PAGESIZE * mmap.PAGESIZE, addresses.stop, PART_BYTES):
        if madvise is None or madvise(start, min(PART_BYTES, addresses.stop - start), MADV_POPULATE_WRITE):
            return
        yield


def _is_one_cpu(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return {device.platform for device in array.sharding.device_set} == {"cpu"} and len(array.sharding.device_set) == 1


def _allocated(described: jax.ShapeDtypeStruct) -> jax.Array:
    """An array that XLA allocates and nothing writes to."""
    _register()
    allocate = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(described.shape, described.dtype))
    array: jax.Array = jax.jit(lambda: allocate(), out_shardings=described.sharding)()
    return array.block_until_ready()


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_WRITE_NOTHING), platform="cpu")


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    """The C library's function of this name; None: other systems keep what was in the memory."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
