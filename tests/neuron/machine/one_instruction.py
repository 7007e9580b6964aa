"""A bench for single instructions: one core, tensors laid out by hand, no kernel around them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from moedecode.neuron.machine.chip import Chip
from moedecode.neuron.machine.machine import Machine
from moedecode.neuron.machine.memory import Buffer
from moedecode.neuron.machine.program import Program
from moedecode.neuron.machine.tensor import Tensor


class Bench:
    """The running core."""

    def __init__(self, chip: str | Chip, **options: object) -> None:
        self.machine = Machine(chip, **options)
        self.prog = Program(self.machine, 0, 1)

    def sbuf(self, values: np.ndarray, dtype: object = None) -> Tensor:
        return self._filled(values, dtype, Buffer.sbuf)

    def psum(self, values: np.ndarray, dtype: object = None) -> Tensor:
        tensor = self._filled(values, dtype, Buffer.psum)
        tensor.storage.written[:] = True
        return tensor

    def _filled(self, values: np.ndarray, dtype: object, buffer: Buffer) -> Tensor:
        values = np.asarray(values)
        tensor = self.prog.allocate(values.shape, dtype or values.dtype, buffer)
        if not tensor.storage.phantom:
            tensor.array()[...] = values.astype(tensor.dtype)
        return tensor

    def empty(
        self, shape: tuple[int, ...], dtype: object = np.float32, buffer: Buffer = Buffer.sbuf
    ) -> Tensor:
        return self.prog.allocate(shape, dtype, buffer)

    def empty_psum(self, shape: tuple[int, ...], dtype: object = np.float32) -> Tensor:
        return self.prog.allocate(shape, dtype, Buffer.psum)

    def seconds(self, engine: str) -> float:
        return self.machine.timeline.bounds().get(engine, 0.0)


@contextmanager
def bench(chip: str | Chip = "trn3", **options: object) -> Iterator[Bench]:
    made = Bench(chip, **options)
    made.prog.enter()
    try:
        yield made
    finally:
        made.prog.leave()
