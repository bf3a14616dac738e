"""The check of the kernels on a GPU: its arithmetic, its report, and its correctness half here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from specserve_kernels.gpu_check import __main__ as script
from specserve_kernels.gpu_check import report
from specserve_kernels.gpu_check.__main__ import limits
from specserve_kernels.gpu_check.report import Correct, Report, Speed, Step, as_json, table
from tests.interpreted_triton import ON_DEVICES, reachable

from specserve_kernels.gpu_check.correctness import CHECKS, TINY, Sizes  # isort: skip (needs triton)
from specserve_kernels.gpu_check.decoder import check_replay  # isort: skip
from specserve_kernels.gpu_check.paged import PAGED_CHECKS  # isort: skip
from specserve_kernels.gpu_check import correctness, decoder, paged  # isort: skip
from specserve_kernels.gpu_check import speeds, steps, timing  # isort: skip
from specserve_kernels.gpu_check.compiling import compile_ahead, compile_in_processes  # isort: skip
from specserve_kernels.triton_kernels import compaction, norms, reading  # isort: skip
from specserve_kernels.triton_kernels.model_shapes import ModelShape  # isort: skip

RIGHT = Correct("gemm", "product", 3, 1e-6, 1e-5)
FAST = Speed("sampling", "160 rows", 20.0, 40_000_000, "one read", 18.0, 0.4, 1.2)
NEAR = Step("8B + 0.6B", 2, 2, 500.0, 450.0, 0.85)
A_REPORT = Report("a GPU", {"torch": "2.11"}, "command", 4000.0, 9.0, [RIGHT], [FAST], [NEAR])


def test_speeds_are_bytes_over_time_and_shares_are_of_the_measured_copy() -> None:
    assert FAST.gb_per_s == pytest.approx(2000.0)  # 40 MB in 20 us
    assert A_REPORT.share_of_copy(FAST) == pytest.approx(0.5)
    assert FAST.of_peer == pytest.approx(20 / 18)


def test_a_steps_tokens_are_the_expected_run_of_right_guesses_and_one() -> None:
    assert NEAR.tokens == pytest.approx(1 + 0.8 + 0.64)
    assert NEAR.tokens_per_s == pytest.approx(2 * 2.44 / 500e-6)
    assert NEAR.floor_share == pytest.approx(0.9)


def test_a_report_without_problems_has_none() -> None:
    assert report.problems(A_REPORT) == []
    assert report.problems(Report("a GPU", {}, "command")) == []


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"correct": [Correct("gemm", "c", 3, 2e-5, 1e-5)]}, "gemm (c) is wrong: 2e-05"),
        ({"correct": [Correct("gemm", "c", 3, math.nan, 1e-5)]}, "gemm (c) is wrong: nan"),
        ({"speeds": [Speed("k", "c", 20.0, 40_000_000, share_wanted=0.6)]}, "50% of the copy, 60%"),
        (
            {"speeds": [Speed("k", "c", 3.0, 1, "torch", 2.0, most_of_peer=1.2)]},
            "1.50 x torch, 1.20",
        ),
        ({"steps": [Step("8B", 1, 0, 10.0, 5.0, 0.85)]}, "8B, batch 1, K 0: 50% of the floor, 85%"),
        ({"failures": ["gemm raised OutOfResources: registers"]}, "gemm raised OutOfResources"),
    ],
)
def test_what_is_wrong_or_misses_its_goal_is_said(
    part: dict[str, list[object]], problem: str
) -> None:
    [sentence] = report.problems(Report("a GPU", {}, "command", 4000.0, **part))  # type: ignore[arg-type]
    assert problem in sentence


def test_the_table_has_a_line_per_result_and_says_what_was_skipped() -> None:
    text = table(
        Report("a GPU", {"torch": "2.11"}, "cmd", 4000.0, 9.0, [RIGHT], [FAST], [NEAR], ["x"])
    )
    assert "a GPU; torch 2.11; 9 s; `cmd`" in text
    assert "| gemm | product | 3 | 1e-06 | 1e-05 |" in text
    assert "| sampling | 160 rows | 20.0 | 2000 | 50% | 1.11 x one read |" in text
    assert "| 8B + 0.6B | 2 | 2 | 500 | 90% | 9760 |" in text
    assert text.endswith("skipped: x")


def test_the_json_holds_fields_and_what_follows_from_them() -> None:
    read = json.loads(as_json(A_REPORT))
    assert read["device"] == "a GPU"
    assert read["problems"] == []
    assert read["speeds"][0]["share_of_copy"] == pytest.approx(0.5)
    assert read["steps"][0]["tokens_per_s"] == pytest.approx(9760)


def test_so_many_sets_of_data_are_gone_through_that_no_cache_holds_them() -> None:
    assert speeds.num_sets(40 << 20) * (40 << 20) >= 400 << 20
    assert speeds.num_sets(1 << 40) == 2
    assert speeds.num_sets(1) == 64


def test_each_part_has_its_share_of_the_time_and_what_earlier_ones_leave() -> None:
    assert limits(["speed", "correct", "step"], 100) == pytest.approx(
        {"correct": 45, "speed": 75, "step": 100}
    )
    assert limits(["step"], 100) == {"step": 100}


def test_kernels_are_compiled_ahead_in_processes_and_what_fails_there_is_only_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert compile_ahead(torch.device("cpu")) == []
    assert compile_in_processes("sm_90", ("swiglu",), "Llama-3-8B", 100) == []
    assert list(tmp_path.rglob("swiglu_kernel.cubin"))
    [failed] = compile_in_processes("sm_90", ("swiglu",), "no such model", 100)
    assert "compiling swiglu ahead" in failed
    assert "no such model" in failed


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "specserve_kernels.gpu_check", *arguments],
        env=base | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = run_check()
    assert done.returncode == 2
    assert done.stdout.startswith("the kernels cannot be checked on a GPU here: torch ")
    assert "sees no GPU on this machine" in done.stdout
    assert done.stderr == ""


def test_interpreted_kernels_are_not_measured_and_unknown_parts_are_refused() -> None:
    assert "TRITON_INTERPRET=1 is set" in run_check(TRITON_INTERPRET="1").stdout
    done = run_check("--parts", "correct,prices")
    assert done.returncode == 2
    assert "prices: no such part, choose from correct, speed, step" in done.stderr


ALL_CHECKS = {**CHECKS, **PAGED_CHECKS, "step": check_replay}


@ON_DEVICES
@pytest.mark.parametrize("name", ALL_CHECKS)
def test_every_kernel_passes_its_check_at_tiny_sizes(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses_of = compaction.cache_addresses
    with ExitStack() as stack:

        def watched(caches: list[torch.Tensor]) -> compaction.CacheAddresses:
            stack.enter_context(reachable(caches))
            return addresses_of(caches)

        monkeypatch.setattr(compaction, "cache_addresses", watched)
        results = list(ALL_CHECKS[name](TINY, torch.device(device)))
    assert results
    assert [result for result in results if not result.ok] == []


@ON_DEVICES
def test_a_kernel_that_is_wrong_fails_its_check(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = norms.add_rms_norm
    monkeypatch.setattr(norms, "add_rms_norm", lambda *args: right(*args) * 1.05)
    results = list(CHECKS["norms"](TINY, torch.device(device)))
    assert not any(result.ok for result in results)


@ON_DEVICES
def test_the_plain_read_reads_everything(device: str) -> None:
    x = torch.arange(10_000, dtype=torch.float32, device=device)
    assert reading.read_once(x).tolist() == [4095.0, 8191.0, 9999.0]


TINY_SHAPE = ModelShape("tiny", 64, 96, 4, 2, 16, 200)


def call_once(calls: list[Callable[[], object]], *, rounds: int = 1) -> float:
    """Stands for a CUDA graph's time: what is measured here is that it runs."""
    for call in calls:
        call()
    return 10.0


@ON_DEVICES
def test_every_speed_is_of_calls_that_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "median_microseconds", call_once)
    monkeypatch.setattr(speeds, "num_sets", lambda num_bytes: 2)
    scale = speeds.Scale(TINY_SHAPE, (1, 2), ((1, 20), (2, 10)), (1, 5), (3,), guesses=1)
    found = [speed for measure in speeds.SPEEDS for speed in measure(scale, torch.device(device))]
    kernels = {speed.kernel for speed in found}
    assert kernels >= {"sampling + verification", "gemm", "attention", "norms", "rope_kv", "swiglu"}
    assert len({(speed.kernel, speed.case) for speed in found}) == len(found)
    goals = {speed.kernel for speed in found if speed.most_of_peer or speed.share_wanted}
    assert goals == {"sampling + verification", "attention"}


@ON_DEVICES
def test_a_step_runs_draft_target_and_verdicts(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "median_microseconds", call_once)
    models = {"big": (TINY_SHAPE, 2), "small": (TINY_SHAPE, 1)}
    plan = steps.Plan(models, (("big", "small"),), (1,), (0, 2), context=8)
    found = list(steps.step_times(plan, torch.device(device), copy_bytes_per_s=1e9))
    assert [(step.num_guesses, step.floor_share_wanted) for step in found] == [
        (0, 0.85), (2, 0.0), (0, 0.85), (2, 0.0)
    ]  # fmt: skip
    # Two layers or one of (128 x 64) + (64 x 64) + (192 x 64) + (64 x 96), the head, KV of 8.
    big, small = (
        2 * (layers * (8192 + 4096 + 12288 + 6144) + 200 * 64) + layers * 8 * 2 * 2 * 16 * 2
        for layers in (2, 1)
    )
    assert found[0].floor_microseconds == pytest.approx(big / 1e3)
    assert found[1].floor_microseconds == pytest.approx((big + 2 * small) / 1e3)


@ON_DEVICES
def test_the_whole_script_is_rehearsed_at_tiny_sizes(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the clock: options, parts, what raises, JSON, table and the exit code."""

    def a_check(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
        yield Correct("engine", "replay", 1, 0, 0)
        raise RuntimeError("out of luck")

    shape = TINY_SHAPE
    scale = speeds.Scale(shape, (1,), ((1, 20),), (1,), (3,), guesses=1)
    plan = steps.Plan({"tiny": (shape, 1)}, (("tiny", "tiny"),), (1,), (0, 1), context=8)
    monkeypatch.setattr(script, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(timing, "copy_bytes_per_s", lambda device: 1e12)
    monkeypatch.setattr(correctness, "CHECKS", {"norms": CHECKS["norms"]})
    monkeypatch.setattr(paged, "PAGED_CHECKS", {"swiglu": PAGED_CHECKS["swiglu"]})
    monkeypatch.setattr(decoder, "check_replay", lambda sizes, device: iter(()))
    monkeypatch.setattr(speeds, "SPEEDS", (speeds.elementwise_speeds, speeds.sampling_speeds))
    monkeypatch.setattr(speeds, "num_sets", lambda num_bytes: 2)
    for module in (speeds, steps):
        monkeypatch.setattr(module, "median_microseconds", call_once)
    said: list[str] = []
    ended = script.main(
        ["--json", str(tmp_path / "found.json"), "--seconds", "600"],
        said.append,
        more={"engine": a_check},
        extent=script.Extent(TINY, scale, plan, torch.device(device)),
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended == 1
    assert found["failures"] == ["engine raised RuntimeError: out of luck"]
    assert {one["kernel"] for one in found["correct"]} == {"engine", "norms", "swiglu"}
    kernels = {"norms", "rope_kv", "swiglu", "sampling + verification"}
    assert {one["kernel"] for one in found["speeds"]} == kernels
    assert [one["num_guesses"] for one in found["steps"]] == [0, 1, 0, 1]
    assert found["skipped"] == []
    assert "| tiny + tiny, exact replay | 1 | 0 |" in said[0]
