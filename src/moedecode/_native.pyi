"""The compiled core of moedecode. Private: use the Python API."""

import enum
from typing import Annotated, Any

from numpy.typing import NDArray


class Format(enum.Enum):
    fp32 = 0

    fp16 = 1

    bf16 = 2

    fp8_e4m3 = 3

    fp8_e5m2 = 4

    mxfp8_e4m3 = 5

    mxfp8_e5m2 = 6

    mxfp4 = 7

class IoType(enum.Enum):
    float32 = 0

    float16 = 1

    bfloat16 = 2

class Precision(enum.Enum):
    a16 = 0

    a8 = 1

    mxfp8 = 2

class ScaleKind(enum.Enum):
    none = 0

    e8m0 = 1

    block128 = 2

class Strategy(enum.Enum):
    selective = 0

    grouped = 1

    all_expert = 2

class AffinityScale(enum.Enum):
    NO_SCALE = 0

    POST_SCALE = 1

    PRE_SCALE = 2

class Score(enum.Enum):
    softmax = 0

    sigmoid = 1

class Activation(enum.Enum):
    silu = 0

    swish = 1

    gelu = 2

    gelu_tanh = 3

    relu2 = 4

    relu = 5

class Projection(enum.Enum):
    gate = 0

    up = 1

    down = 2

class ExpertSpec:
    def __init__(self, activation: Activation, alpha: float, up_offset: float, gate_lower: float, gate_upper: float, up_lower: float, up_upper: float, affinity: AffinityScale, precision: Precision, round_h: bool) -> None: ...

class PackedExperts:
    def __init__(self, experts: int, hidden: int, intermediate: int, format: Format, kind: ScaleKind, order_hidden: Annotated[NDArray[Any], dict(device='cpu', writable=False)], order_intermediate: Annotated[NDArray[Any], dict(device='cpu', writable=False)]) -> None: ...

    def set(self, expert: int, which: Projection, codes: Annotated[NDArray[Any], dict(device='cpu', writable=False)], scale: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, row_scale: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, bias: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, threads: int) -> None: ...

    @property
    def nbytes(self) -> int: ...

class Router:
    def __init__(self, weight: Annotated[NDArray[Any], dict(device='cpu', writable=False)], format: Format, top_k: int, score: Score, pre_norm: bool, normalise: bool, norm_eps: float, scale: float, matmul_type: IoType, bias: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, selection_bias: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None) -> None: ...

class Block:
    def __init__(self, hidden: int, width: int, eps: float, gamma: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, router: Router, experts: PackedExperts, expert_spec: ExpertSpec, shared: PackedExperts | None, shared_spec: ExpertSpec | None, shared_gate: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None) -> None: ...

    def run(self, io: IoType, x: Annotated[NDArray[Any], dict(device='cpu', writable=False)], residual: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, mask: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, out: Annotated[NDArray[Any], dict(device='cpu')], residual_out: Annotated[NDArray[Any], dict(device='cpu')] | None, logits: Annotated[NDArray[Any], dict(device='cpu')] | None, index: Annotated[NDArray[Any], dict(device='cpu')] | None, affinities: Annotated[NDArray[Any], dict(device='cpu')] | None, strategy: Strategy, first_expert: int, threads: int, profile: Annotated[NDArray[Any], dict(device='cpu')] | None = None) -> None: ...

def run_router(router: Router, io: IoType, x: Annotated[NDArray[Any], dict(device='cpu', writable=False)], logits: Annotated[NDArray[Any], dict(device='cpu')], index: Annotated[NDArray[Any], dict(device='cpu')], affinities: Annotated[NDArray[Any], dict(device='cpu')], hidden: int, threads: int) -> None: ...

def run_experts(experts: PackedExperts, spec: ExpertSpec, io: IoType, x: Annotated[NDArray[Any], dict(device='cpu', writable=False)], index: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, affinities: Annotated[NDArray[Any], dict(device='cpu', writable=False)], strategy: Strategy, first_expert: int, out_type: IoType, out: Annotated[NDArray[Any], dict(device='cpu')], threads: int) -> None: ...

def run_norm(io: IoType, hidden: int, width: int, eps: float, gamma: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, x: Annotated[NDArray[Any], dict(device='cpu', writable=False)], residual: Annotated[NDArray[Any], dict(device='cpu', writable=False)] | None, out: Annotated[NDArray[Any], dict(device='cpu')], residual_out: Annotated[NDArray[Any], dict(device='cpu')] | None, threads: int) -> None: ...

def stages() -> list[str]:
    """Columns of a profile."""

def isa() -> str:
    """The instruction set in use."""

def available_isas() -> list[str]:
    """The instruction sets this CPU and build have, best last."""

def use_isa(name: str) -> None:
    """Switch the instruction set for the whole process."""

def set_workspace_limit(bytes: int) -> int:
    """For tests: bound the memory between the stages of a call."""

def cores() -> int:
    """Cores this process may run on."""

def stream_read_gbps(megabytes: int, threads: int, repeats: int) -> float:
    """Best memory read bandwidth of `repeats` passes, in GB/s."""
