"""The residency contract, as something that runs: for every leaf, what may touch HBM and what stays in SBUF.

- HBM holds kernel inputs, kernel outputs (the optional residual among them) and nothing else. The spec allows
  all-expert mode a hand-off of affinities through HBM; these kernels have none.
- The normed hidden, expert indices, affinities of the chosen experts and (MX) codes and scales of the hidden
  live in SBUF on both cores, from the stage that makes them until the experts have used them.
- Every input element is read once per chip (selective: each routed expert once per token), every output
  element written once and never read back.

Ledger-only mode at the size of gpt-oss-120b's layer, few experts where nothing depends on their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from moedecode.neuron.kernels import moe_block_tkg, moe_tkg, norm
from moedecode.neuron.kernels.nki_names import nisa, nl
from moedecode.neuron.machine import Machine, StandIn
from moedecode.neuron.machine.dtypes import float4_e2m1fn_x4
from moedecode.neuron.machine.memory import Buffer
from moedecode.spec import ExpertAffinityScaleMode, RouterActFn

BF16, U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)
WEIGHTS = ("expert_gate_up_weights", "expert_down_weights", "expert_gate_up_weights_scale")
WEIGHTS += ("expert_down_weights_scale", "expert_gate_up_bias", "expert_down_bias")


FORMS = {
    "": lambda h, i: {},
    "distinct": lambda h, i: {"distinct": True},
    "dynamic": lambda h, i: {"is_all_expert_dynamic": True, "block_size": 32},
    "shared": lambda h, i: {
        "shared_expert_gate_w": StandIn((h, i), BF16),
        "shared_expert_up_w": StandIn((h, i), BF16),
        "shared_expert_down_w": StandIn((i, h), BF16),
    },
    "routing": lambda h, i: {"return_routing": True},
}
"""Arguments of the leaves' other forms, the shared expert, and the routing as an output."""


@dataclass(frozen=True)
class Config:
    """One call of the block; ``mx``: MXFP4 weights, else bfloat16."""

    mx: bool
    all_expert: bool
    t: int
    h: int = 3072
    i: int = 384
    e: int = 16
    local: int = 4
    k: int = 4
    residual: bool = False
    bias: bool = True
    pre_norm: bool = False
    form: str = ""

    def __str__(self):
        leaf = f"{'all_expert' if self.all_expert else 'selective'}{'_mx' if self.mx else ''}"
        extras = ["residual"] * self.residual + ["pre"] * self.pre_norm + [self.form] * bool(self.form)
        return "-".join([leaf, f"T{self.t}", f"I{self.i}", *extras])

    @property
    def quantised_once(self):
        """The dynamic leaf quantises the tokens that it gathers, block by block."""
        return self.mx and self.form != "dynamic"

    def arguments(self):
        owned = self.local if self.all_expert else self.e
        h, i, e = self.h, self.i, self.e
        given = {
            "inp": StandIn((1, self.t, h), BF16),
            "gamma": StandIn((1, h), BF16),
            "router_weights": StandIn((h, e), BF16),
            "router_bias": StandIn((1, e), BF16) if self.bias else None,
            "top_k": self.k,
            "router_act_fn": RouterActFn.SOFTMAX,
            "router_pre_norm": self.pre_norm,
            "expert_affinities_scaling_mode": ExpertAffinityScaleMode.POST_SCALE,
            "is_all_expert": self.all_expert,
            "rank_id": np.array([[1]], np.int32) if self.all_expert else None,
            "residual": StandIn((1, self.t, h), BF16) if self.residual else None,
            "expert_down_bias": StandIn((owned, h), BF16) if self.bias else None,
        } | FORMS[self.form](h, i)
        if not self.mx:
            given["expert_gate_up_weights"] = StandIn((owned, h, 2, i), BF16)
            given["expert_down_weights"] = StandIn((owned, i, h), BF16)
            given["expert_gate_up_bias"] = StandIn((owned, 2, i), BF16) if self.bias else None
            return given
        lanes, tiles = (128, -(-i // 512)) if i >= 512 else (8 * -(-i // 32), 1)
        given["expert_gate_up_weights"] = StandIn((owned, 128, 2, h // 512, i), float4_e2m1fn_x4)
        given["expert_gate_up_weights_scale"] = StandIn((owned, 16, 2, h // 512, i), U8)
        given["expert_down_weights"] = StandIn((owned, lanes, tiles, h), float4_e2m1fn_x4)
        given["expert_down_weights_scale"] = StandIn((owned, -(-lanes // 8), tiles, h), U8)
        given["expert_gate_up_bias"] = StandIn((owned, lanes, 2, tiles, 4), BF16) if self.bias else None
        return given

    def run(self, **options):
        machine = Machine("trn3", compute=False)
        return machine.run(moe_block_tkg.moe_block_tkg, **(self.arguments() | options)).report

    def outputs(self):
        """Shapes and dtypes that the kernel may create in HBM."""
        wide = ((self.t, self.h), "bfloat16")
        made = [wide, ((self.t, self.e), "bfloat16"), *([wide] if self.residual else [])]
        if self.form == "routing":
            made += [((self.t, self.k), "uint32"), ((self.t, self.e), "float32")]
        return sorted(made)


CONFIGS = [
    Config(mx=True, all_expert=False, t=1),
    Config(mx=True, all_expert=False, t=4, residual=True),
    Config(mx=True, all_expert=False, t=5, i=640, bias=False, pre_norm=True),
    Config(mx=True, all_expert=True, t=4, residual=True, pre_norm=True),
    Config(mx=True, all_expert=True, t=160, i=768),
    Config(mx=False, all_expert=False, t=1),
    Config(mx=False, all_expert=False, t=6, pre_norm=True, bias=False),
    Config(mx=False, all_expert=True, t=3, pre_norm=True),
    Config(mx=False, all_expert=True, t=132, residual=True),
    Config(mx=True, all_expert=False, t=16, form="distinct"),
    Config(mx=True, all_expert=True, t=64, form="dynamic"),
    Config(mx=True, all_expert=True, t=8, form="shared"),
    Config(mx=False, all_expert=False, t=2, form="shared"),
    Config(mx=True, all_expert=False, t=2, form="routing"),
]


def assert_hbm_contract(config, report):
    """HBM holds the inputs and the outputs, the latter written once and never read back."""
    inputs = {name for name, value in config.arguments().items() if isinstance(value, StandIn | np.ndarray)}
    made = [row for row in report.rows if row.kind != "input"]
    assert {row.name for row in report.rows if row.kind == "input"} == inputs
    assert sorted((row.shape, row.dtype) for row in made) == config.outputs()
    for row in made:
        assert sum(row.written) == row.distinct_written_chip == row.nbytes, f"{row.name} is not written once"
        assert sum(row.read) == 0, f"{row.name} is read back"


def assert_read_once(config, report):
    """Inputs once per chip; in selective mode the experts' tensors once per token and choice."""
    for row in report.rows:
        if row.kind != "input":
            continue
        if row.name in WEIGHTS and not config.all_expert:
            expert = row.nbytes // config.e
            assert sum(row.read) <= config.t * config.k * expert, f"{row.name}: more than its routed experts"
        else:
            assert row.reread == 0, f"{row.name}: {row.reread} bytes read more than once"
            padded = row.name in WEIGHTS  # lanes of padding need not be read
            assert padded or row.distinct_read_chip == row.nbytes, f"{row.name}: not all of it is read"


def assert_sbuf_contract(config, report):
    """What stages hand over lies in SBUF on both cores, and outlives the stage that comes between."""
    wanted = ["normed_hidden", "expert_index", "eager_affinities"]
    wanted += ["hidden_codes", "hidden_scales"] if config.quantised_once else []
    unnamed = {life.name for life in report.residency if life.name.startswith(("sbuf#", "psum#"))}
    assert not unnamed, "what the tables of a run show needs a name"
    lives = {}
    for life in report.residency:
        lives.setdefault((life.name, life.core), []).append(life)
    for core in (0, 1):
        for name in wanted:
            found = lives.get((name, core), [])
            assert len(found) == 1, f"{name} on core {core}: {len(found)} tensors"
            assert found[0].buffer is Buffer.sbuf
        # The order of the stages: the experts still have what the norm made before the router ran.
        (hidden,), (routed,) = lives["normed_hidden", core], lives["eager_affinities", core]
        (used,) = lives["hidden_codes" if config.quantised_once else "normed_hidden", core]
        assert hidden.first < routed.first, "the router ran before the norm"
        assert used.last > routed.first, f"{used.name} dies in the router"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_contract(config):
    report = config.run()
    assert_hbm_contract(config, report)
    assert_read_once(config, report)
    assert_sbuf_contract(config, report)


def _spill(monkeypatch, name, position=None):
    """Plants the fault that the contract forbids: a stage's result makes a trip through HBM."""
    original = getattr(norm, name)

    def spilling(*args, **kwargs):
        made = original(*args, **kwargs)
        tensor = made if position is None else made[position]
        hbm = nl.ndarray(tuple(tensor.shape), dtype=tensor.dtype, buffer=nl.hbm)
        nisa.dma_copy(dst=hbm, src=tensor)
        nisa.dma_copy(dst=tensor, src=hbm)
        return made

    for module in (norm, moe_block_tkg, moe_tkg):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, spilling)


@pytest.mark.parametrize(("name", "position"), [("rmsnorm", None), ("quantize_hidden", 0)])
def test_a_trip_through_hbm_is_caught(monkeypatch, name, position):
    _spill(monkeypatch, name, position)
    config = CONFIGS[0]
    with pytest.raises(AssertionError):
        assert_hbm_contract(config, config.run())


def test_a_second_read_is_caught(monkeypatch):
    """Both cores norming everything themselves reads inp twice."""
    original = norm.part_of

    def everything(hidden, t):
        return replace(original(hidden, t), token=0, tokens=t, column=0, columns=hidden // 128, idle=False)

    monkeypatch.setattr(norm, "part_of", everything)
    monkeypatch.setattr(norm, "complete", lambda hidden_major, part: None)
    config = CONFIGS[0]
    report = config.run()
    with pytest.raises(AssertionError, match="inp"):
        assert_read_once(config, report)
