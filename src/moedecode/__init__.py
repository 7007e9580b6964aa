"""moedecode: the feed-forward block of a Mixture-of-Experts decoder layer in one fused call.

    RMSNorm -> router -> [shared expert] -> expert MLPs -> weighted sum [+ residual]

See ``docs/architecture.md`` for the floors of this package.
"""

from .block import BlockResult, MoEBlock
from .formats import WeightFormat
from .gates import InvalidInput, MissingExtra, MoEDecodeError, UnsupportedConfig
from .plan import Plan
from .presets import presets
from .spec import ActFn, BlockSpec, ExpertAffinityScaleMode, ExpertSpec, RouterActFn, RouterSpec
from .tkg import PackedWeights, mask_expert_affinities, moe_block_tkg, moe_tkg, pack, rmsnorm_tkg, router_topk
from .weights import BlockWeights, ExpertWeights

__version__ = "0.1.0"

__all__ = [
    "ActFn",
    "BlockResult",
    "BlockSpec",
    "BlockWeights",
    "ExpertAffinityScaleMode",
    "ExpertSpec",
    "ExpertWeights",
    "InvalidInput",
    "MissingExtra",
    "MoEBlock",
    "MoEDecodeError",
    "PackedWeights",
    "Plan",
    "RouterActFn",
    "RouterSpec",
    "UnsupportedConfig",
    "WeightFormat",
    "mask_expert_affinities",
    "moe_block_tkg",
    "moe_tkg",
    "pack",
    "presets",
    "rmsnorm_tkg",
    "router_topk",
]
