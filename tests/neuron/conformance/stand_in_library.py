"""A checkout of our own making, with the names of the public library and nothing of its content.

Its kernels copy an answer into HBM that a test puts into ANSWERS; its references hand out another one.
"""

from __future__ import annotations

from pathlib import Path

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl

ANSWERS = {}


@nki.jit
def moe_block_tkg(inp, gamma, router_weights, expert_gate_up_weights, expert_down_weights,
                  top_k, rank_id=None, router_bias=None, residual=None, expert_gate_up_weights_scale=None,
                  expert_down_weights_scale=None, expert_gate_up_bias=None, expert_down_bias=None,
                  router_act_fn=None, router_pre_norm=True, norm_topk_prob=False,
                  expert_affinities_scaling_mode=None, hidden_act_fn=None, gate_clamp_upper_limit=None,
                  up_clamp_upper_limit=None, up_clamp_lower_limit=None, router_mm_dtype=None,
                  hidden_actual=None, is_all_expert=False):
    answer = ANSWERS["kernel"]
    if isinstance(answer, Exception):
        raise answer
    tokens, hidden = inp.shape[1], inp.shape[2]
    out = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    if answer is None:  # nobody writes it
        return (out,)
    tile = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=answer)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=tile)
    return (out,)
"""

REFERENCE = """
import torch


def moe_block_tkg_torch_ref(inp, **_):
    from ..moe_block import moe_block_tkg
    return {"out": torch.as_tensor(moe_block_tkg.ANSWERS["reference"])}
"""

ENUMS = """
from enum import Enum


class ActFnType(Enum):
    SiLU = 0
    Swish = 3


class RouterActFnType(Enum):
    SIGMOID = 0
    SOFTMAX = 1


class ExpertAffinityScaleMode(Enum):
    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
"""

NAMES = {
    "moe_block/moe_block_tkg.py": KERNEL,
    "moe_block/moe_block_tkg_torch.py": REFERENCE,
    "moe/moe_tkg/moe_tkg.py": "def moe_tkg(): ...",
    "moe/moe_tkg/moe_tkg_torch.py": "def moe_tkg_torch_ref(): ...",
    "router_topk/router_topk.py": "def router_topk(): ...",
    "router_topk/router_topk_torch.py": "def router_topk_torch_ref(): ...",
    "subkernels/rmsnorm_tkg.py": "def rmsnorm_tkg(): ...",
    "subkernels/rmsnorm_torch.py": "def rms_norm_torch_ref(): ...",
    "subkernels/rmsnorm_mx_quantize_tkg.py": "def rmsnorm_mx_quantize_tkg(): ...",
    "utils/mx_torch_common.py": "def quantize_to_mx(): ...",
    "utils/tensor_view.py": "class TensorView: ...",
    "utils/common_types.py": ENUMS,
}


def write_checkout(folder: Path) -> Path:
    """Write it below `folder` and return the path of the checkout."""
    package = folder / "checkout" / "src" / "nkilib_src" / "nkilib"
    for name, text in NAMES.items():
        file = package / "core" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (package / "version").mkdir()
    (package / "version" / "__init__.py").write_text('__version__ = "stand-in"\n')
    for directory in [package.parent, *(d for d in package.rglob("*") if d.is_dir()), package]:
        (directory / "__init__.py").touch()
    return folder / "checkout"
