"""Reading the golden vectors: files, cases and arrays in their logical dtypes.

The folder is ``../shared/golden`` beside the checkout, or what MOEDECODE_GOLDEN names.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import moedecode as md

FOLDER = Path(os.environ.get("MOEDECODE_GOLDEN") or Path(__file__).parents[2] / "shared" / "golden")
ABSENT = f"golden vectors not found in {FOLDER}; set MOEDECODE_GOLDEN to their folder"
PRESENT = any(FOLDER.glob("*.npz"))
NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


@functools.cache
def _file(stem):
    with np.load(FOLDER / f"{stem}.npz") as z:
        arrays = {name: z[name] for name in z.files}
    return json.loads(str(arrays.pop("meta"))), arrays


@dataclass(frozen=True)
class Case:
    """One case of one file."""

    stem: str
    number: int

    def __str__(self):
        return f"{self.stem}-{self.fields['id']}"

    @property
    def meta(self):
        return _file(self.stem)[0]

    @property
    def fields(self):
        return self.meta["cases"][self.number]

    @property
    def options(self):
        return dict(self.fields["options"])

    def logical(self, name):
        """Logical dtype of an array of the file."""
        return self.meta["arrays"][name]["dtype"]

    def array(self, name):
        """An array with bfloat16 bits as bfloat16; None stays None."""
        if name is None:
            return None
        array = _file(self.stem)[1][name]
        return array.view(ml_dtypes.bfloat16) if self.logical(name) == "bfloat16" else array

    def inputs(self, widen=False):
        """All inputs by argument name; ``widen`` turns 16-bit floats into float32."""
        given = {argument: self.array(name) for argument, name in self.fields["inputs"].items()}
        if widen:
            given = {
                k: v.astype(np.float32) if v is not None and v.dtype in NARROW else v
                for k, v in given.items()
            }
        return given

    def want(self, output):
        """An expected array, or None if the case has none."""
        return self.array((self.fields["expected"] | self.fields["expected_intermediate"]).get(output))

    def weight_dtype(self):
        """The logical dtype of integer weight arrays, None for float weights."""
        name = self.logical(self.fields["inputs"]["expert_gate_up_weights"])
        return None if name in ("bfloat16", "float16", "float32") else name


def cases(kind):
    """Parameters: every case of ``kind``, or one skipped parameter that says what is missing."""
    if not PRESENT:
        return [pytest.param(None, marks=pytest.mark.skip(reason=ABSENT), id=f"{kind}-absent")]
    found = []
    for path in sorted(FOLDER.glob("*.npz")):
        meta = _file(path.stem)[0]
        if meta["kind"] == kind:
            found += [Case(path.stem, number) for number in range(len(meta["cases"]))]
    return [pytest.param(case, id=str(case)) for case in found]


def mx_projection(case, backend):
    """``out`` of an mx_projection case: one expert on a hidden state that arrives quantised."""
    inputs, o = case.inputs(), case.options
    tokens, bias, down_bias = o["T"], inputs.get("gate_up_bias"), inputs.get("down_bias")
    return md.moe_tkg(
        inputs["hidden_quant"],
        inputs["gate_up_weights"][None],
        inputs["down_weights"][None],
        np.ones((tokens, 1), np.float32),
        np.zeros((tokens, 1), np.int32),
        False,
        expert_gate_up_bias=None if bias is None else bias[None],
        expert_down_bias=down_bias,
        expert_gate_up_weights_scale=inputs["gate_up_scale"][None],
        expert_down_weights_scale=inputs["down_scale"][None],
        hidden_input_scale=inputs["hidden_scale"],
        expert_affinities_scaling_mode="POST_SCALE",
        activation_fn=o["hidden_act_fn"],
        expert_weight_dtype=case.logical(case.fields["inputs"]["gate_up_weights"]),
        backend=backend,
    )
