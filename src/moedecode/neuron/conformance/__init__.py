"""Owns the comparison with the public nki-library: a user's checkout runs unmodified on the machine model,
against its own references.

Must not be known by the rest of moedecode: it stands above the flat functions, whose reference says who is
right. PyTorch is imported here alone, by the library's references. `python -m moedecode.neuron.conformance
PATH` prints the table.
"""

from __future__ import annotations

from .checkout import CheckoutError, PublicLibrary, open_checkout
from .compare import Difference, Verdict
from .configs import MODELS, BlockConfig, hbm_floor
from .figures import Figures, block_figures, public_block
from .rows import ROWS, Row, chosen_rows
from .run import Outcome, run_row

__all__ = [
    "MODELS",
    "ROWS",
    "BlockConfig",
    "CheckoutError",
    "Difference",
    "Figures",
    "Outcome",
    "PublicLibrary",
    "Row",
    "Verdict",
    "block_figures",
    "chosen_rows",
    "hbm_floor",
    "open_checkout",
    "public_block",
    "run_row",
]
