"""The compiled sampler (native/sampler.h): rows of logits in, tokens out, without the interpreter.

Equal to specserve.sampler's numpy form bit for bit. Calls release the interpreter lock, keep no
state, and may run at once on several threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from functools import cache
from typing import NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from specserve_kernels import native_library

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

MASS_UNIT = 2.0**-40  # masses are whole multiples of it
MAX_VOCAB = 2**22  # so that the masses of all tokens add up in 63 bits


class RowSpec(ctypes.Structure):
    """One row and what is wanted of it: SamplerRow of native/sampler.h, field by field.

    logits: address of [num_tokens] f32. temperature: 0 is greedy. sharpness: > 0. min_weight:
    log(min_p), -inf for none. top_p of 1 and top_k of 0, and what lies beyond them: none
    """

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("seed_low", ctypes.c_uint64),
        ("seed_is_negative", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("purpose", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("sharpness", ctypes.c_float),
        ("min_weight", ctypes.c_float),
        ("top_k", ctypes.c_int32),
    )


class Choice(ctypes.Structure):
    """token_id: -1 where nothing can be chosen; best: the largest logit, then not finite."""

    _fields_ = (("token_id", ctypes.c_int64), ("best", ctypes.c_float))


class Masses(NamedTuple):
    """total: of exp(logit - best) over all tokens, in MASS_UNIT

    best_ids: ascending, fewer than asked for where no more are finite
    """

    best: float
    total: int
    best_ids: NDArray[np.int32]


def available() -> bool:
    """Whether this process has the compiled sampler; native_library.why_not says why not."""
    return _library() is not None


def fits(logits: F32 | F64) -> TypeGuard[F32]:
    """Whether [n] logits can be given to the sampler as they lie in memory."""
    return logits.dtype == np.float32 and logits.flags.c_contiguous and len(logits) <= MAX_VOCAB


def choose(rows: Seq[RowSpec]) -> ctypes.Array[Choice]:
    """[L] choices of L rows, on this thread. The arrays behind the addresses must be alive."""
    count = len(rows)
    choices = (Choice * count)()
    _loaded().specserve_sampler_choose((RowSpec * count)(*rows), 0, count, choices)
    return choices


def choose_one(row: RowSpec) -> Choice:
    """`choose` for one row."""
    choice = Choice()
    _loaded().specserve_sampler_choose(ctypes.byref(row), 0, 1, ctypes.byref(choice))
    return choice


def masses(logits: F32, num_best: int) -> Masses | None:
    """What log-probabilities of [n] f32 contiguous logits need; None if the best is not finite."""
    ids = np.empty(num_best, dtype=np.int32)
    best = ctypes.c_float()
    total = _loaded().specserve_sampler_masses(
        address(logits), len(logits), num_best, ids.ctypes.data, ctypes.byref(best)
    )
    return None if total < 0 else Masses(best.value, total, ids[ids >= 0])


def penalise(
    logits: F32,
    known: NDArray[np.int64],
    *,
    num_prompt: int,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """In place: repetition for every token of `known`, the others for those after the prompt.

    logits: [n] contiguous
    known:  [k] the tokens before this one, num_prompt of the prompt first; ids that are no token of
            these n do not count
    """
    _loaded().specserve_sampler_penalise(
        address(logits),
        len(logits),
        known.ctypes.data,
        len(known),
        num_prompt,
        presence,
        frequency,
        repetition,
    )


def address(logits: F32) -> int:
    """Of a contiguous array's first element."""
    data: int = logits.__array_interface__["data"][0]
    return data


def instruction_set() -> str:
    """The loops in use: "avx512", "avx2" or "portable"; all give the same bits."""
    name: bytes = _loaded().specserve_sampler_instruction_set()
    return name.decode()


def use_instruction_set(name: str) -> bool:
    """Use those loops from now on (tests; while no row is chosen). False: this machine cannot."""
    return bool(_loaded().specserve_sampler_use(name.encode()))


@cache
def _library() -> ctypes.CDLL | None:
    library = native_library.load()
    if library is None:
        return None
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.specserve_sampler_choose.argtypes = [pointer, size, size, pointer]
    library.specserve_sampler_choose.restype = None
    library.specserve_sampler_masses.argtypes = [pointer, size, size, pointer, pointer]
    library.specserve_sampler_masses.restype = size
    library.specserve_sampler_penalise.argtypes = [
        *(pointer, size),
        *(pointer, size, size),
        *(real, real, ctypes.c_float),
    ]
    library.specserve_sampler_penalise.restype = None
    library.specserve_sampler_instruction_set.argtypes = []
    library.specserve_sampler_instruction_set.restype = ctypes.c_char_p
    library.specserve_sampler_use.argtypes = [ctypes.c_char_p]
    library.specserve_sampler_use.restype = ctypes.c_int32
    return library


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"no compiled sampler: {native_library.why_not()}")
    return library
