"""`specserve bench step`: every part of a step has one meaning, on a tiny model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch

from specserve.bench.floor import NativeFloor, TorchFloor, floor_of, products_of
from specserve.bench.measure import Breakdown, Case, arbitrary_guesses, measure
from specserve.bench.step import (
    StepReport,
    bench,
    fit_of,
    grid_cases,
    least_squares,
    render,
    sweep_cases,
)
from specserve.cli import main
from specserve.drafting import DraftRow
from specserve.loading import LoadedModel
from specserve.models.decoder import Decoder
from specserve.models.native import NativeDecoder
from specserve.tokenizer import Tokenizer
from specserve_kernels import make_backend, native_step
from tests.build import a_request
from tests.scripted import VOCAB_SIZE, byte_tokenizer
from tests.tiny_models import random_weights, tiny_config

CONFIG = tiny_config(vocab=VOCAB_SIZE, max_positions=512)


def a_loaded_model(*, native: bool = False) -> LoadedModel:
    weights = random_weights(CONFIG)
    model: object
    if native:
        if not native_step.available():
            pytest.skip("the native kernels are not built")
        model = NativeDecoder(CONFIG, weights, dtype="int8", threads=2)
    else:
        model = Decoder(CONFIG, weights, dtype=torch.float32, backend=make_backend("cpu"))
    return LoadedModel(cast(Decoder, model), cast(Tokenizer, byte_tokenizer()), Path("tiny"))


def a_breakdown(case: Case, *, step: float = 1.0) -> Breakdown:
    numbers = dict.fromkeys(("floor", "ratio", "forward", "draft", "verify", "host"), 0.5)
    return Breakdown(
        case=case,
        num_steps=1,
        num_rows=case.batch,
        num_logits=case.batch,
        step=step,
        gemm=None,
        attention=None,
        rest=None,
        plan=0.1,
        commit=0.4,
        **numbers,
    )


# ---- one measurement ---------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("num_guesses", [0, 3])
def test_a_step_has_all_its_rows_and_its_parts_fit_into_it(native: bool, num_guesses: int) -> None:
    loaded = a_loaded_model(native=native)
    floor = floor_of(loaded.decoder, CONFIG, torch.float32, threads=2)
    one = measure(loaded, floor, Case(batch=3, num_guesses=num_guesses, context=40), num_steps=6)
    assert one.num_rows == one.num_logits == 3 * (1 + num_guesses)
    assert one.num_steps >= 6
    assert 0 < one.forward < one.step
    assert 0 < one.plan < one.host < one.step
    assert one.verify > 0
    assert one.ratio > 0
    assert (one.gemm is not None) == native
    if one.gemm is not None and one.attention is not None and one.rest is not None:
        assert min(one.gemm, one.attention, one.rest) > 0
        assert one.gemm < one.forward


def test_waiting_requests_wait_until_the_measurement_is_over() -> None:
    loaded = a_loaded_model()
    floor = floor_of(loaded.decoder, CONFIG, torch.float32, threads=1)
    case = Case(batch=2, num_guesses=0, context=20, num_waiting=50)
    assert measure(loaded, floor, case, num_steps=5).num_rows == 2


def test_sampling_at_a_temperature_is_measured_too() -> None:
    loaded = a_loaded_model()
    floor = floor_of(loaded.decoder, CONFIG, torch.float32, threads=1)
    case = Case(batch=2, num_guesses=2, context=20, temperature=1.0)
    assert measure(loaded, floor, case, num_steps=5).num_rows == 6


def test_guesses_are_as_many_as_asked_for() -> None:
    row = DraftRow(
        seq_id=3,
        request=a_request(4, drafter="scripted", draft_tokens=5),
        history=[1, 2, 3, 4],
        num_known=4,
        max_tokens=5,
        kv_len=0,
        block_table=(0,),
    )
    draft = arbitrary_guesses(5)(row)
    assert len(draft.token_ids) == 5
    assert draft.parents == (-1, 0, 1, 2, 3)


# ---- the floor ---------------------------------------------------------------------------------


def test_the_floor_multiplies_every_matrix_of_the_model_once() -> None:
    products = products_of(CONFIG)
    assert len(products) == 4 * CONFIG.num_layers + 1
    weights = sum(t.numel() for t in random_weights(CONFIG).values() if t.dim() == 2)
    embedding = CONFIG.vocab_size * CONFIG.hidden_size
    assert sum(product.n * product.k for product in products) == weights - embedding
    assert [product.is_head for product in products] == [False] * (len(products) - 1) + [True]


def test_a_floor_takes_time_for_any_number_of_rows() -> None:
    floor = TorchFloor(products_of(CONFIG), torch.float32)
    assert all(floor.seconds(rows, rows) > 0 for rows in (1, 8, 33))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_native_floor_writes_every_column_of_every_product(threads: int) -> None:
    loaded = a_loaded_model(native=True)
    model = cast(object, loaded.decoder)
    assert isinstance(model, NativeDecoder)
    floor = NativeFloor(model, threads)
    shares = floor.column_shares()
    assert len(shares) == threads
    for product, *columns in zip(products_of(CONFIG), *shares, strict=True):
        assert columns[0][0] == 0
        assert columns[-1][1] == product.n
        assert all(left[1] == right[0] for left, right in pairwise(columns))
    assert floor.seconds(4, 2) > 0


# ---- what is asked and what is shown -----------------------------------------------------------


def test_the_grid_has_every_batch_with_every_k_and_ends_beside_a_queue() -> None:
    cases = grid_cases([1, 8], [0, 3], 64, 0.0, num_waiting=10_000)
    assert [(case.batch, case.num_guesses, case.num_waiting) for case in cases] == [
        (1, 0, 0),
        (1, 3, 0),
        (8, 0, 0),
        (8, 3, 0),
        (8, 0, 0),
        (8, 0, 10_000),
    ]


def test_a_sweep_ends_where_the_model_does() -> None:
    assert [c.context for c in sweep_cases(1, 0.0, 8192, 20)][-2:] == [4096, 8192 - 28]
    assert [c.context for c in sweep_cases(1, 0.0, 512, 20)] == [128, 256, 484]


def test_a_line_is_fitted_exactly_and_its_scatter_is_told() -> None:
    intercept, slope, r_squared = least_squares([(0, 2.0), (100, 4.0), (200, 6.0)])
    assert (intercept, slope, r_squared) == pytest.approx((2.0, 0.02, 1.0))
    *_, scattered = least_squares([(0, 0.0), (1, 1.0), (2, 0.0)])
    assert scattered == pytest.approx(0.0)


def test_the_fit_counts_the_tokens_of_the_whole_batch() -> None:
    cases = [Case(batch=4, num_guesses=0, context=context) for context in (250, 500)]
    fit = fit_of([a_breakdown(cases[0], step=2.0), a_breakdown(cases[1], step=3.0)])
    assert fit.ms_per_1000_tokens == pytest.approx(1.0)
    assert fit.fixed_ms == pytest.approx(1.0)


def test_the_report_names_its_decoder_and_survives_as_json() -> None:
    case = Case(batch=2, num_guesses=1, context=16)
    report = bench("tiny", "fp32", a_loaded_model(), [case], num_steps=4)
    assert msgspec.json.decode(msgspec.json.encode(report), type=StepReport) == report
    assert report.decoder == "Decoder"
    text = render(report)
    assert "tiny as fp32, Decoder" in text
    assert text.splitlines()[2].split()[:3] == ["2", "1", "16"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch", "0"], "--batch is '0'"),
        (["--guesses", "a"], "--guesses is 'a'"),
        (["--context", "1"], "--context is 1"),
        (["--steps", "0"], "--steps is 0"),
        (["--json", "/no/such/folder/x"], "its folder does not exist"),
        (["--backend", "magic"], "magic"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_loads(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", "--model", "./nowhere", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_help_names_both_benches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert "step" in shown
    assert "perplexity" in shown
