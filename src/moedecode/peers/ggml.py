"""The parts of the ggml C library that a graph needs, through ctypes: llama-cpp-python brings the library.

Owns signatures and memory of contexts, buffers and graphs. Knows nothing of experts.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from ..arrays import Array
from ..gates import MissingExtra

__all__ = ["F32", "TYPES", "Ggml"]

F32 = 0
TYPES = {"f32": F32, "q8_0": 8, "bf16": 30, "mxfp4": 39}
_CPU_DEVICE = 0
_GRAPH_TENSORS = 256

_P, _I, _L, _F, _Z = c_void_p, c_int, c_int64, c_float, c_size_t
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_log_set": (None, (_P, _P)),
    "ggml_tensor_overhead": (_Z, ()),
    "ggml_graph_overhead": (_Z, ()),
    "ggml_nbytes": (_Z, (_P,)),
    "ggml_new_tensor_1d": (_P, (_P, _I, _L)),
    "ggml_new_tensor_2d": (_P, (_P, _I, _L, _L)),
    "ggml_new_tensor_3d": (_P, (_P, _I, _L, _L, _L)),
    "ggml_reshape_2d": (_P, (_P, _P, _L, _L)),
    "ggml_reshape_3d": (_P, (_P, _P, _L, _L, _L)),
    "ggml_view_2d": (_P, (_P, _P, _L, _L, _Z, _Z)),
    "ggml_cont": (_P, (_P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_add_id": (_P, (_P, _P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_div": (_P, (_P, _P, _P)),
    "ggml_sum_rows": (_P, (_P, _P)),
    "ggml_get_rows": (_P, (_P, _P, _P)),
    "ggml_soft_max": (_P, (_P, _P)),
    "ggml_rms_norm": (_P, (_P, _P, _F)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_argsort_top_k": (_P, (_P, _P, _I)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_swiglu_oai": (_P, (_P, _P, _P, _F, _F)),
    "ggml_set_input": (None, (_P,)),
    "ggml_set_output": (None, (_P,)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_alloc_graph": (c_bool, (_P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_tensor_get": (None, (_P, _P, _Z, _Z)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buft_alloc_buffer": (_P, (_P, _Z)),
    "ggml_backend_buft_name": (c_char_p, (_P,)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_backend_dev_by_type": (_P, (_I,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_dev_supports_op": (c_bool, (_P, _P)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _I)),
    "ggml_backend_cpu_set_threadpool": (None, (_P, _P)),
    "ggml_threadpool_new": (_P, (_P,)),
}


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class _TensorHead(ctypes.Structure):
    """The first fields of a tensor: enough to say which buffer it would lie in."""

    _fields_ = (("type", c_int), ("buffer", c_void_p))


class Ggml:
    """The library with a CPU backend of ``threads`` threads, one thread pool for everything run on it.

    ``new``, ``op`` and friends return ggml's pointers; all of it lives as long as the process.
    """

    def __init__(self, threads: int) -> None:
        self._libraries = _load()
        self._functions: dict[str, Any] = {}
        init = self._find("ggml_init")
        init.restype, init.argtypes = c_void_p, (_InitParams,)
        self._init = init
        self._quiet = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, data: None)
        self.call("ggml_log_set", self._quiet, None)
        self.device = self.call("ggml_backend_dev_by_type", _CPU_DEVICE)
        self.backend = self.call("ggml_backend_cpu_init")
        self.call("ggml_backend_cpu_set_n_threads", self.backend, threads)
        defaults = self._find("ggml_threadpool_params_default")
        defaults.restype, defaults.argtypes = _ThreadpoolParams, (c_int,)
        params = defaults(threads)
        pool = self.call("ggml_threadpool_new", ctypes.addressof(params))
        self.call("ggml_backend_cpu_set_threadpool", self.backend, pool)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of :data:`_SIGNATURES`."""
        function = self._functions.get(name)
        if function is None:
            function = self._find(name)
            function.restype, function.argtypes = _SIGNATURES[name]
            self._functions[name] = function
        return function(*arguments)

    def context(self, tensors: int = _GRAPH_TENSORS) -> Any:
        """Room for the descriptions of ``tensors`` tensors and a graph, not for their data."""
        size = tensors * self.call("ggml_tensor_overhead") + self.call("ggml_graph_overhead")
        return self._init(_InitParams(size, None, True))

    def write(self, tensor: Any, array: Array) -> None:
        """Fill a whole tensor; a repacking buffer rearranges it on the way."""
        size = self.call("ggml_nbytes", tensor)
        if size != array.nbytes or not array.flags.c_contiguous:
            raise ValueError(f"a tensor of {size} bytes cannot take {array.nbytes}")
        self.call("ggml_backend_tensor_set", tensor, array.ctypes.data, 0, size)

    def read(self, tensor: Any, array: Array) -> None:
        """Copy a tensor out."""
        self.call("ggml_backend_tensor_get", tensor, array.ctypes.data, 0, array.nbytes)

    def weight_buffer_type(self, make_op: Any) -> tuple[Any, str]:
        """Where llama.cpp would put a weight: the first extra buffer type whose operation is supported.

        ``make_op(context)`` returns (weight, operation on it). Falls back to plain memory.
        """
        for buffer_type in self._extra_buffer_types():
            weight, operation = make_op(self.context())
            buffer = self.call("ggml_backend_buft_alloc_buffer", buffer_type, 0)
            _TensorHead.from_address(weight).buffer = buffer
            supported = self.call("ggml_backend_dev_supports_op", self.device, operation)
            self.call("ggml_backend_buffer_free", buffer)
            if supported:
                return buffer_type, self.call("ggml_backend_buft_name", buffer_type).decode()
        return self.call("ggml_backend_cpu_buffer_type"), "CPU"

    def _extra_buffer_types(self) -> list[Any]:
        registry = self.call("ggml_backend_dev_backend_reg", self.device)
        name = b"ggml_backend_dev_get_extra_bufts"
        address = self.call("ggml_backend_reg_get_proc_address", registry, name)
        if not address:
            return []
        found = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
        types: list[Any] = []
        while found and found[len(types)]:
            types.append(found[len(types)])
        return types

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise MissingExtra(f"the ggml library of llama-cpp-python has no {name}; install a newer one")


def _load() -> list[ctypes.CDLL]:
    """ggml's libraries, those that others need first."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise MissingExtra("llama-cpp-python is not installed; install it: pip install llama-cpp-python")
    folder = Path(spec.origin).parent / "lib"
    names = ("libggml-base", "libggml-cpu", "libggml")
    paths = [next(iter(sorted(folder.glob(f"{name}.[sd]*"))), None) for name in names]
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths if path is not None]
