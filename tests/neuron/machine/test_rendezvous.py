"""Two programs: turns, exchanges, barriers, registers; every way not to meet is an error, never a hang."""

import threading

import numpy as np
import pytest

from moedecode.neuron.machine import ConstraintViolation, Machine, MachineError, RendezvousError
from moedecode.neuron.machine import isa as nisa
from moedecode.neuron.machine import language as nl
from moedecode.neuron.machine.program import current


def filled(shape, value, dtype=nl.float32):
    tensor = nl.ndarray(shape, dtype)
    nisa.memset(tensor, value)
    return tensor


def exchange(src, dst, pipe=0):
    other = 1 - nl.program_id(0)
    nisa.sendrecv(src=src, dst=dst, send_to_rank=other, recv_from_rank=other, pipe_id=pipe)


def run(kernel, *args, chip="trn2", **options):
    """In a thread with a deadline: a hang is a failure, not a stuck suite."""
    box = []

    def target():
        try:
            box.append(Machine(chip, **options).run(kernel, *args))
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the machine hangs"
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


def test_exchange_swaps_values():
    def kernel(x):
        core = nl.program_id(0)
        mine, theirs = filled((4, 3), float(core + 1)), filled((4, 3), -1.0)
        exchange(mine, theirs)
        out = nl.ndarray((2, 4, 3), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out[core], theirs)
        return out

    out = run(kernel, np.zeros((1, 1), np.float32)).outputs
    assert (out[0] == 2).all() and (out[1] == 1).all()


def test_exchange_sends_what_was_there_when_it_was_issued():
    def kernel():
        core = nl.program_id(0)
        both = filled((2, 2), float(core))
        exchange(both, both)  # in place: each receives the other's old value
        out = nl.ndarray((2, 2, 2), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out[core], both)
        return out

    out = run(kernel).outputs
    assert (out[0] == 1).all() and (out[1] == 0).all()


def test_programs_take_turns_the_same_way_every_time():
    def order():
        log = []

        def kernel():
            core = nl.program_id(0)
            for step in range(3):
                log.append((core, step))
                exchange(filled((1, 1), 0.0), filled((1, 1), 0.0), pipe=step)
            log.append((core, "end"))

        run(kernel)
        return log

    first = order()
    assert all(order() == first for _ in range(5))
    assert first[:2] == [(0, 0), (1, 0)]


def case_send_against_barrier(x):
    if nl.program_id(0) == 0:
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0))
    else:
        nisa.core_barrier(x, (0, 1))


def case_send_against_end(x):
    if nl.program_id(0) == 0:
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0))


def case_end_against_send(x):
    if nl.program_id(0) == 1:
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0))


def case_barrier_against_end(x):
    if nl.program_id(0) == 1:
        nisa.core_barrier(x, (0, 1))


def case_one_exchange_more(x):
    for _ in range(2 + nl.program_id(0)):
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0))


def case_other_pipe(x):
    exchange(filled((1, 1), 0.0), filled((1, 1), 0.0), pipe=nl.program_id(0))


def case_other_shape(x):
    exchange(filled((1, 1 + nl.program_id(0)), 0.0), filled((1, 1), 0.0))


def case_other_dtype(x):
    kind = nl.float32 if nl.program_id(0) else nl.bfloat16
    exchange(filled((1, 1), 0.0, kind), filled((1, 1), 0.0, kind))


def case_barriers_on_different_tensors(x):
    tensors = [nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm) for _ in range(2)]
    nisa.core_barrier(tensors[nl.program_id(0)], (0, 1))


CASES = [value for name, value in sorted(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("kernel", CASES, ids=lambda k: k.__name__)
def test_cores_that_do_not_meet_are_an_error(kernel):
    with pytest.raises(RendezvousError, match=r"do not meet|must agree"):
        run(kernel, np.zeros((1, 1), np.float32))
    before = threading.active_count()
    assert before < 20  # no program thread is left behind waiting


def test_the_message_tells_what_each_core_waits_for():
    with pytest.raises(RendezvousError) as error:
        run(case_send_against_end, np.zeros((1, 1), np.float32))
    assert "core 0 waits in sendrecv(pipe_id=0" in str(error.value) and "core 1 has ended" in str(error.value)


def test_an_exception_of_one_core_reaches_the_caller_and_stops_the_other():
    def kernel():
        if nl.program_id(0) == 1:
            raise KeyError("planted")
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0))

    with pytest.raises(KeyError, match="planted"):
        run(kernel)


def test_operand_rules():
    def wrong_rank():
        nisa.sendrecv(
            src=filled((1, 1), 0.0),
            dst=filled((1, 1), 0.0),
            send_to_rank=nl.program_id(0),
            recv_from_rank=0,
            pipe_id=0,
        )

    def from_hbm():
        shared = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        exchange(shared, filled((1, 1), 0.0))

    def casting():
        exchange(filled((1, 1), 0.0), filled((1, 1), 0.0, nl.bfloat16))

    def private_barrier():
        nisa.core_barrier(nl.ndarray((1, 1), nl.float32, buffer=nl.private_hbm), (0, 1))

    for kernel, rule in [
        (wrong_rank, "exchanges with core"),
        (from_hbm, "must be in SBUF"),
        (casting, "same dtype"),
        (private_barrier, "shared_hbm"),
    ]:
        with pytest.raises(ConstraintViolation, match=rule):
            run(kernel)
    with pytest.raises(ConstraintViolation, match="NeuronCore-v3"):
        run(case_one_exchange_more, np.zeros((1, 1), np.float32), chip="trn1")
    with pytest.raises(RendezvousError, match="nobody to meet"):
        Machine("trn2").run(case_send_against_end, np.zeros((1, 1), np.float32), n_programs=1)


def test_a_single_program_has_no_grid():
    def kernel():
        return (nl.num_programs(0), nl.program_ndim(), nl.program_id(0))

    assert Machine("trn2").run(kernel, n_programs=1).outputs == (1, 0, 0)
    assert run(kernel).outputs == (2, 1, 0)


def test_a_while_loop_runs_on_a_register():
    def kernel(counts):
        left = nl.ndarray((1, 1), nl.int32)
        nisa.dma_copy(left, counts)
        register = nisa.register_alloc(left)
        total = filled((1, 1), 0.0)
        while register:
            nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=2.0)
            nisa.tensor_scalar(dst=left, data=left, op0=nl.subtract, operand0=1)
            nisa.register_load(dst=register, src=left)
        out = nl.ndarray((1, 1), nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(out, total)
        back = nl.ndarray((1, 1), nl.int32)
        nisa.register_move(register, 7)
        nisa.register_store(back, register)
        return out, back

    total, back = run(kernel, np.array([[5]], np.int32)).outputs
    assert total.item() == 10.0 and back.item() == 7


def test_the_nth_shared_allocation_is_one_tensor():
    def kernel():
        core = nl.program_id(0)
        nl.ndarray((3, 3), nl.float32, buffer=nl.shared_hbm, name="first")
        second = nl.ndarray((2, 4), nl.float32, buffer=nl.shared_hbm, name="second")
        nisa.dma_copy(second[core], filled((1, 4), float(core + 1)))
        return second

    np.testing.assert_array_equal(run(kernel).outputs, [[1] * 4, [2] * 4])

    def disagree():
        nl.ndarray((3, 3 + nl.program_id(0)), nl.float32, buffer=nl.shared_hbm)
        nisa.core_barrier(nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm), (0, 1))

    with pytest.raises(ConstraintViolation, match="allocation number 0"):
        run(disagree)


def test_names_work_only_inside_a_run():
    with pytest.raises(MachineError, match="no program is running"):
        current()
    with pytest.raises(MachineError, match="cannot start another run"):
        Machine("trn2").run(lambda: Machine("trn2").run(lambda: None), n_programs=1)
    with pytest.raises(ValueError, match="n_programs=3"):
        Machine("trn2").run(lambda: None, n_programs=3)
