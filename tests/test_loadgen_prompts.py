"""What the load generator asks: the shipped pack, files in many formats, random text."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from specserve_loadgen.client import request_body
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompt_sets import prompts_for
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.settings import Settings, Synthetic
from specserve_loadgen.synthetic import parse_lengths

DATA = Path(__file__).parents[2] / "shared" / "data"

# ---- prompts -----------------------------------------------------------------------------------


def test_the_shipped_pack_covers_its_categories_evenly_and_interleaved() -> None:
    prompts = load_prompts(None)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == {
        *("chat", "code", "math", "summarise", "edit", "extraction", "translation", "json"),
        "repetition",
    }
    assert set(counts.values()) == {8}
    assert len({prompt.category for prompt in prompts[:9]}) == 9
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert len({prompt.messages for prompt in prompts}) == len(prompts)


def test_every_documented_file_format_is_read(tmp_path: Path) -> None:
    jsonl = tmp_path / "p.jsonl"
    jsonl.write_text(
        '{"prompt": "a\u2028b", "id": "x"}\n\n'
        '{"turns": ["first", "second"], "question_id": 81, "category": "writing"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n',
        encoding="utf-8",
    )
    found = {p.prompt_id: [m.content for m in p.messages] for p in load_prompts(str(jsonl))}
    assert found == {"x": ["a\u2028b"], "81": ["first"], "4": ["s", "u"]}
    text = tmp_path / "p.txt"
    text.write_text("one\n\n two \r\n", encoding="utf-8")
    assert [p.messages[0].content for p in load_prompts(str(text))] == ["one", "two"]


def test_only_the_named_categories_are_taken() -> None:
    assert {p.category for p in load_prompts(None, ["json", "math"])} == {"json", "math"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"question": "b", "x": 1}', "line 2: needs one of prompt, turns, "),
        ('{"question": "b", "x": 1}', "its keys are question, x"),
        ('{"prompt": 5}', "line 1: Expected"),
        ("{", "line 1: "),
        ('["a"]', "line 1: Expected"),
        ('{"turns": []}', "needs one of"),
        ("\n\n", "holds no prompts"),
    ],
)
def test_a_bad_prompts_file_is_refused_by_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(LoadgenError) as caught:
        load_prompts(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


# ---- other people's formats --------------------------------------------------------------------


def written(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_sharegpt_is_read_as_what_people_said(tmp_path: Path) -> None:
    talks = [
        {
            "id": "abc",
            "conversations": [
                {"from": "gpt", "value": "Welcome."},
                {"from": "human", "value": "first"},
                {"from": "gpt", "value": "answer"},
                {"from": "human", "value": "second"},
            ],
        },
        {"id": "def", "conversations": [{"from": "user", "value": "alone"}]},
    ]
    first, second = load_prompts(written(tmp_path, "sharegpt.json", talks))
    assert (first.prompt_id, first.messages[0].content, first.later_turns) == (
        "abc",
        "first",
        ("second",),
    )
    assert second.later_turns == ()


def test_a_bad_entry_of_a_list_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "p.json", [{"prompt": "a"}, {"title": "b"}])
    with pytest.raises(LoadgenError, match=r"entry 2: needs one of prompt, turns, .*are title"):
        load_prompts(path)


@pytest.mark.skipif(not DATA.is_dir(), reason="the public prompt sets are not here")
@pytest.mark.parametrize(
    ("name", "count", "most_turns"),
    [
        ("spec_bench/question.jsonl", 480, 2),
        ("eagle_eval/mt_bench.jsonl", 80, 2),
        ("eagle_eval/humaneval.jsonl", 80, 1),
        ("gsm8k/questions.jsonl", 1319, 1),
        ("traces/repro_test_trace.jsonl", 26, 1),
    ],
)
def test_public_sets_are_read_whole(name: str, count: int, most_turns: int) -> None:
    prompts = load_prompts(str(DATA / name))
    assert len(prompts) == count
    assert max(1 + len(p.later_turns) for p in prompts) == most_turns
    assert all(p.messages[0].content for p in prompts)


def test_times_of_prompts_count_from_the_first(tmp_path: Path) -> None:
    lines = '{"prompt": "b", "timestamp": 900}\n{"prompt": "a", "timestamp": 500, "max_tokens": 7}'
    first, second = load_prompts(written(tmp_path, "p.jsonl", lines))
    assert (first.messages[0].content, first.arrival, first.max_tokens) == ("a", 0.0, 7)
    assert (second.messages[0].content, second.arrival) == ("b", pytest.approx(0.4))


def test_equal_hash_ids_of_a_trace_are_equal_beginnings(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1100, "output_length": 5}
    rows = [row | {"hash_ids": [1, 2, 3]}, row | {"hash_ids": [1, 2, 9]}, row]
    one, two, three = load_prompts(written(tmp_path, "t.json", rows))
    assert [len(p.token_ids) for p in (one, two, three)] == [1100] * 3
    assert one.token_ids[:1024] == two.token_ids[:1024]
    assert one.token_ids[1024:] != two.token_ids[1024:]
    assert three.token_ids[:512] != one.token_ids[:512]


def test_azures_times_are_dates(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:04.4799600,396,109\n"
    )
    first, second = load_prompts(written(tmp_path, "azure.csv", text))
    assert (len(first.token_ids), first.max_tokens, first.arrival) == (374, 44, 0.0)
    assert second.arrival == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}', "is 0, not from 1"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 4}', "missing required field"),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 4, "output_length": 1}\n{"prompt": "a"}',
            "part them",
        ),
        ("t.csv", "Timestamp,Request tokens,Response tokens\n1,x,3\n", "line 2: could not"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(LoadgenError, match=words):
        load_prompts(written(tmp_path, name, text))


# ---- random text -------------------------------------------------------------------------------


def drawn(lengths: str, count: int = 4000) -> list[int]:
    rng = random.Random(1)
    draw = parse_lengths("--input-tokens", lengths)
    return [draw(rng) for _ in range(count)]


def test_lengths_have_their_distribution() -> None:
    assert set(drawn("512")) == {512}
    uniform = drawn("uniform:3:6")
    assert set(uniform) == {3, 4, 5, 6}
    assert min(Counter(uniform).values()) > 800
    normal = drawn("normal:500:50")
    assert statistics.mean(normal) == pytest.approx(500, rel=0.02)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.1)
    assert statistics.median(drawn("lognormal:300:0.8")) == pytest.approx(300, rel=0.1)
    assert statistics.mean(drawn("exponential:200")) == pytest.approx(200, rel=0.1)
    assert min(drawn("normal:2:9")) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "many", "uniform:9:3", "uniform:9", "normal:inf:1", "zipf:3", "1:2"]
)
def test_a_bad_length_is_refused_with_the_known_forms(text: str) -> None:
    with pytest.raises(LoadgenError, match="--input-tokens"):
        parse_lengths("--input-tokens", text)


def test_synthetic_prompts_have_exact_lengths_and_repeat_with_their_seed() -> None:
    settings = Settings(
        url="http://x",
        endpoint="completions",
        synthetic=Synthetic(input_tokens="uniform:5:90", vocab_size=9000),
        output_tokens="7",
        num_requests=50,
    )
    prompts = prompts_for(settings)
    assert prompts == prompts_for(settings)
    assert len({p.token_ids for p in prompts}) == len(prompts) == 50
    assert all(5 <= len(p.token_ids) <= 90 and max(p.token_ids) < 9000 for p in prompts)
    body = json.loads(request_body(settings, "m", prompts[3], 3))
    assert body["prompt"] == list(prompts[3].token_ids)
    assert body["max_tokens"] == 7
    words = prompts[3].messages[0].content.split()
    assert len(words) == len(prompts[3].token_ids)


def test_prompts_of_a_group_share_their_beginning_and_nothing_else() -> None:
    wanted = Synthetic(input_tokens="20", prefix_groups=3, prefix_tokens=40)
    prompts = prompts_for(Settings(url="http://x", synthetic=wanted, num_requests=9))
    beginnings = [p.token_ids[:40] for p in prompts]
    assert len(set(beginnings)) == 3
    assert beginnings[0] == beginnings[3] == beginnings[6]
    assert len({p.token_ids[40:] for p in prompts}) == 9
    assert {len(p.token_ids) for p in prompts} == {60}
    words = [p.messages[0].content.split() for p in prompts]
    assert words[0][:40] == words[3][:40] != words[1][:40]
    assert prompts[1].category == "prefix 1"
