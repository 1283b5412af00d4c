"""The benchmarks' own arithmetic: points, the output of the peers' scripts, ratios and tables.  Nothing is timed."""

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import handoff_engines
import jax
import pytest
import small_model

from glmjax.config import GLMConfig
from glmjax.options import engine_options
from glmjax.params import random_params
from glmjax.serving.disaggregated import DisaggregatedEngine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs a checkout, and this is Bazel's sandbox")


def part(name: str) -> ModuleType:
    """A module of benchmarks, which is on no path of the tests; of its folder ``support`` unless it is a script."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name if (BENCHMARKS / f"{name}.py").exists() else f"support.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))


def sample(system: str, point: Any, speed: float | None, round_: int = 0, **more: Any) -> Any:
    return part("results").Sample(system, point, round_, speed, **more)


def test_points_are_read_and_put_in_order() -> None:
    points = part("results").parse_points("8192,512", "16:512, 1:512,1:8192")
    assert [str(p) for p in points] == [
        "prefill 512",
        "decode 1 x 512",
        "decode 16 x 512",
        "prefill 8192",
        "decode 1 x 8192",
    ]
    assert part("results").parse_points("", "") == []


@pytest.mark.parametrize(
    ("prefill", "decode"), [("x", ""), ("0", ""), ("", "512"), ("", "1:"), ("", "-1:5"), ("1.5", "")]
)
def test_bad_points_are_refused(prefill: str, decode: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        part("results").parse_points(prefill, decode)


def test_rounds_go_there_and_back() -> None:
    assert [part("results").in_turn(["a", "b"], i) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_only_whole_json_objects_are_taken_from_output() -> None:
    text = 'warning: no GPU\n{"kind": "prefill", "tok_s": 2.5}\n{"cut": \n[1]\n'
    assert part("machine").json_lines(text) == [{"kind": "prefill", "tok_s": 2.5}]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('{\"a\": 1}')", [{"a": 1}]),
        ("pass", [{"error": "exit code 0: no result"}]),
        ("import sys; sys.exit('broken')", [{"error": "exit code 1: broken"}]),
    ],
)
def test_call_says_what_went_wrong(script: str, expected: list[dict[str, Any]]) -> None:
    assert part("machine").call([sys.executable, "-c", script], timeout=60) == expected


def test_ratio_is_that_of_medians_to_the_better_peer() -> None:
    results = part("results")
    point = results.Point.prefill(512)
    systems = ["ours", "llama.cpp auto", "llama.cpp off", "transformers"]
    samples = [sample("ours", point, speed, i) for i, speed in enumerate((10.0, 90.0, 30.0))]
    samples += [sample("llama.cpp auto", point, 15.0, other_cores=0.3), sample("llama.cpp off", point, 12.0)]
    samples += [sample("transformers", point, None, error="out of memory")]
    (row,) = results.speed_rows(samples, [point], systems)
    assert (row["tok_s"]["ours"], row["better_peer"], row["ratio"], row["met"]) == (30.0, "llama.cpp auto", 2.0, True)
    assert row["ratio_by_peer"] == {"llama.cpp auto": 2.0, "llama.cpp off": 2.5}
    assert row["failed"] == ["transformers"] and row["worst_other_cores"] == 0.3
    assert json.loads(json.dumps(row)) == row


def test_the_target_is_higher_for_long_contexts() -> None:
    results = part("results")
    points = [results.Point.decode(1, n) for n in (512, 2048, 8192)]
    samples = [sample(system, p, speed) for p in points for system, speed in (("ours", 20.0), ("transformers", 10.0))]
    assert [row["met"] for row in results.speed_rows(samples, points, ["ours", "transformers"])] == [True, None, False]


def test_memory_is_the_peak_of_all_rounds_against_the_leaner_llama() -> None:
    results = part("results")
    point = results.Point.decode(16, 8192)
    samples = [sample("ours", point, 1.0, i, peak_rss_mb=peak) for i, peak in enumerate((2700.0, 2500.0))]
    samples += [sample("llama.cpp auto", point, 1.0, peak_rss_mb=1600.0)]
    samples += [sample("llama.cpp off", point, 1.0, peak_rss_mb=1700.0)]
    (row,) = results.memory_rows(samples, [point], ["ours", "llama.cpp auto", "llama.cpp off"])
    assert row["over_llama_mb"] == 1100.0 and row["met"] is False
    (alone,) = results.memory_rows(samples[:2], [point], ["ours"])
    assert alone["over_llama_mb"] is None and alone["met"] is None


def test_growth_leaves_the_scan_out() -> None:
    results = part("results")
    points = [results.Point.decode(1, n) for n in (512, 2048, 8192)] + [results.Point.decode(4, 512)]
    times = {512: (11.0, 10.0), 2048: (14.0, 11.0), 8192: (32.0, 12.0)}
    samples = [
        sample("ours", p, 1.0, details={"step_ms": times[p.length][0], "step_without_scan_ms": times[p.length][1]})
        for p in points
    ]
    (row,) = results.growth_rows(samples, points)
    assert row["scan_ms"] == {512: 1.0, 8192: 20.0}
    assert row["growth_without_scan"] == 1.2 and row["met"] and row["growth"] == pytest.approx(32 / 11)
    without = [sample("ours", p, 1.0, details={"step_ms": 5.0}) for p in points]
    (row,) = results.growth_rows(without, points)
    assert row["growth_without_scan"] is None and row["met"] is None and row["scan_ms"] == {512: None, 8192: None}


class Script:
    """Stands for a peer's script: gives its answers in turn and keeps the commands."""

    def __init__(self, *answers: list[dict[str, Any]]):
        self.answers, self.commands = list(answers), []

    def __call__(self, command: list[str], timeout: float, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        self.commands.append(command)
        return self.answers.pop(0)


def llama_rows(speed: float, load: float) -> list[dict[str, Any]]:
    return [{"kind": kind, "tok_s": speed, "peak_rss_mb": 5.0, "other_cores": load} for kind in ("prefill", "decode")]


def test_one_llama_process_gives_prefill_and_decode_of_a_round() -> None:
    systems, results = part("systems"), part("results")
    script = Script(llama_rows(7.0, 0.9), [{"error": "status 9"}], llama_rows(8.0, 0.1), llama_rows(9.0, 0.0))
    settings = systems.Settings(model="m", threads=2, attempts=3)
    llama = systems.Llama(settings, Path("peers"), "bin", "f.gguf", "off", run=script)
    prefill, decode = results.Point.prefill(512), results.Point.decode(1, 512)
    first = [llama.measure(p, 0) for p in (prefill, decode)]
    assert [(s.system, s.tok_s, s.other_cores) for s in first] == [("llama.cpp off", 8.0, 0.1)] * 2
    assert len(script.commands) == 3
    assert llama.measure(decode, 1).tok_s == 9.0
    assert script.commands[0][-4:] == ["--ctx", "512", "--batch", "1"]


def test_disturbed_llama_keeps_the_quietest() -> None:
    systems, results = part("systems"), part("results")
    script = Script(llama_rows(7.0, 0.3), llama_rows(8.0, 0.9))
    settings = systems.Settings(model="m", threads=2, attempts=2)
    llama = systems.Llama(settings, Path("peers"), "bin", "f.gguf", "auto", run=script)
    assert llama.measure(results.Point.prefill(64), 0).tok_s == 7.0


def test_silent_llama_is_asked_again() -> None:
    systems, results = part("systems"), part("results")
    silent = [{"error": "status 0: "}]
    script = Script(silent, silent, llama_rows(8.0, 0.9), silent, silent, silent)
    settings = systems.Settings(model="m", threads=2, attempts=1)
    llama = systems.Llama(settings, Path("peers"), "bin", "f.gguf", "auto", run=script)
    assert llama.measure(results.Point.prefill(64), 0).tok_s == 8.0
    missed = llama.measure(results.Point.prefill(64), 1)
    assert missed.tok_s is None and missed.error == "status 0: " and not script.answers


def test_transformers_figure_is_the_fastest_way_or_the_error() -> None:
    systems, results = part("systems"), part("results")
    rows = [
        {"kind": "prefill", "tok_s": s, "other_cores": [0.2, 0.4], "attn": a} for s, a in ((3.0, "sdpa"), (2.0, "x"))
    ]
    script = Script(rows, [{"kind": "decode", "error": "over 900 s"}])
    settings = systems.Settings(model="m", threads=2)
    transformers = systems.Transformers(settings, Path("peers"), "python", "sdpa,x", run=script)
    found = transformers.measure(results.Point.prefill(64), 0)
    assert (found.tok_s, found.other_cores, found.details["attn"]) == (3.0, 0.4, "sdpa")
    assert script.commands[0][-6:] == ["--prefill", "64", "--batch", "", "--ctx", ""]
    missed = transformers.measure(results.Point.decode(16, 64), 0)
    assert missed.tok_s is None and missed.error == "over 900 s"


def test_tables_show_every_row() -> None:
    results, tables = part("results"), part("tables")
    points = [results.Point.decode(1, 512), results.Point.decode(1, 8192)]
    samples = [sample("ours", p, 31.5, details={"step_ms": 2.0, "step_without_scan_ms": 1.0}) for p in points]
    samples += [sample("llama.cpp auto", points[0], 21.0), sample("llama.cpp auto", points[1], None, error="[no]")]
    systems = ["ours", "llama.cpp auto"]
    console = part("cpu_peers").Console(record=True, width=200, file=io.StringIO())
    console.print(tables.speed_table(results.speed_rows(samples, points, systems), systems))
    console.print(tables.memory_table(results.memory_rows(samples, points, systems), systems))
    console.print(tables.growth_table(results.growth_rows(samples, points)))
    text = console.export_text()
    for expected in ("1.50x", "1x met", "failed", "decode 1 x 8192", "8192", "1.00x"):
        assert expected in text


MISSING = [
    ({}, "--peers"),
    ({"peers": "elsewhere"}, "--peers"),
    ({"peers": "peers"}, "--llama"),
    ({"peers": "peers", "llama": "no-such-program"}, "--llama"),
    ({"peers": "peers", "llama": sys.executable}, "--gguf"),
    ({"peers": "peers", "llama": sys.executable, "gguf": "peers/bench_llamacpp.py"}, "--transformers"),
    ({"ours_only": True, "decode": "512"}, "--prefill / --decode"),
    ({"ours_only": True, "prefill": "", "decode": ""}, "--prefill / --decode"),
    ({"ours_only": True}, "--model"),
]


@pytest.mark.parametrize(("given", "option"), MISSING)
def test_what_is_missing_is_named_by_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("peers").mkdir()
    for name in ("bench_llamacpp.py", "bench_transformers.py"):
        Path("peers", name).touch()
    script = part("cpu_peers")
    paths = {key: Path(value) if key == "peers" else value for key, value in given.items()}
    with pytest.raises(script.typer.BadParameter) as caught:
        script.main(Path("none"), **paths)
    assert caught.value.param_hint == option


def test_a_run_of_ours_alone_prints_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, systems = part("cpu_peers"), part("systems")
    answer = {"tok_s": 4.0, "peak_rss_mb": 9.0, "other_cores": 0.0, "compile_s": 1.0, "step_ms": 2.0}
    monkeypatch.setattr(systems.Ours, "_run", lambda self, point, kind: answer)
    (tmp_path / "config.json").touch()
    with pytest.raises(script.typer.Exit) as caught:
        script.main(tmp_path, ours_only=True, decode="1:8", prefill="8", as_json=True, out=tmp_path / "out.json")
    assert caught.value.exit_code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert [row["tok_s"] for row in printed["speed"]] == [{"ours": 4.0}] * 2
    assert len(printed["samples"]) == 6 and printed["settings"]["model"] == tmp_path.name


def test_script_without_arguments_says_how_to_use_it() -> None:
    command = [sys.executable, str(BENCHMARKS / "cpu_peers.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--transformers" in done.stdout


def test_layout_costs_has_a_row_for_each_layout_step_and_context() -> None:
    script = part("layout_costs")
    rows = script.bytes_rows(["tp8", "pcp8_dcp8", "dp8"], [0, 1 << 20], 2048, 16)
    cells = {(row["layout"], row["step"], row["context"]): row for row in rows}
    assert len(cells) == len(rows) == 12
    assert [cells["pcp8_dcp8", "prefill", n]["kv"] for n in (0, 1 << 20)] == ["kv_gather", "query_gather"]
    assert cells["tp8", "decode", 0]["layer_bytes"] == 2 * 2 * 16 * 6144 * 2 * 7 // 8
    layouts = [script.Layout.parse(name) for name in script.default_layouts()]
    assert set(layouts) == set(script.PRESETS.values()) and len(set(layouts)) == len(layouts)


def test_layout_costs_times_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    script = part("layout_costs")
    monkeypatch.setattr(script, "TINY", script.GLMConfig.tiny(num_hidden_layers=1, first_k_dense_replace=1))
    rows = script.time_rows(["tp=2"], [0, 16], 16, 2, 1)
    assert [(row["step"], row["context"]) for row in rows] == [
        ("prefill", 0),
        ("prefill", 16),
        ("decode", 0),
        ("decode", 16),
    ]
    assert all(row["step_ms"] > 0 for row in rows)


def test_layout_costs_prints_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = part("layout_costs")
    script.main(["pcp8"], "0,2K", 2048, 16, False, as_json=True, out=tmp_path / "out.json")
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert [row["context"] for row in printed["received_bytes_glm_5_3"]] == [0, 2048, 0, 2048]
    assert printed["simulated_step_ms_tiny"] == []


def test_layout_costs_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    part("layout_costs").main(["pcp8_dcp8"], "248K", 2048, 16, False)
    assert "191.9 kv" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "message"), [("x", "is not lengths"), ("-1", "negative"), ("", "is not lengths")])
def test_layout_costs_refuses_contexts_that_are_no_lengths(given: str, message: str) -> None:
    script = part("layout_costs")
    with pytest.raises(script.typer.BadParameter, match=message):
        script.numbers(given)


def test_layout_costs_refuses_layouts_that_are_none() -> None:
    script = part("layout_costs")
    with pytest.raises(script.typer.BadParameter, match="ep=3 must be"):
        script.main(["pcp=8,ep=3"], "0", 2048, 16, False)


class FakeLLM:
    """Engines without a model behind the options of ``LLM``; a step takes a second."""

    def __init__(self, model: str = "", max_model_len: int = 64, prefill: str = "", **options: Any):
        engine_options(max_model_len=max_model_len, **options, **({"prefill": prefill} if prefill else {}))
        hub: dict[str, Any] = {}
        self.clock = handoff_engines.StillClock()
        blocks = {"num_blocks": 64, "stage_blocks": 32, "max_model_len": max_model_len}
        first, second = (handoff_engines.make_engine(hub, self.clock, **blocks) for _ in range(2))
        self.engine = DisaggregatedEngine(first, second) if prefill else second
        self._step, self.engine.step = self.engine.step, self.step

    def step(self) -> None:
        self.clock.now += 1
        self._step()

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


SAID = [[(7 * turn + i) % 50 for i in range(10)] for turn in range(4)]  # answers are of five tokens, blocks of four


def test_a_pair_lacks_the_new_tokens_and_prefill_the_answer_too() -> None:
    found = part("disaggregated_turns").converse(FakeLLM(prefill="dp=1", decode="dp=1").engine, SAID, 5)
    assert [t.prompt_tokens for t in found.turns] == [10, 25, 40, 55] and len(found.token_ids) == 60
    assert [t.cached_tokens for t in found.turns] == [0, 12, 28, 44]  # whole blocks of 14, 29, 44
    assert [t.computed_tokens for t in found.turns] == [10, 25 - 8, 40 - 24, 55 - 40]  # whole blocks of 10, 25, 40
    assert [t.bytes_fetched for t in found.turns] == [28 * missing for missing in (9, 24 - 12, 39 - 28, 54 - 44)]


def test_one_engine_computes_what_its_prefix_cache_lacks_or_all() -> None:
    script = part("disaggregated_turns")
    caching, forgetting = (script.converse(FakeLLM().engine, SAID, 5, forgets=f) for f in (False, True))
    assert caching.token_ids == forgetting.token_ids
    assert [t.cached_tokens for t in caching.turns] == [0, 12, 28, 44]
    assert [t.computed_tokens for t in caching.turns] == [10, 13, 12, 11]
    assert [t.computed_tokens for t in forgetting.turns] == [10, 25, 40, 55]
    assert not any(t.cached_tokens or t.bytes_fetched for t in forgetting.turns)


def test_time_to_first_token_is_from_the_request_to_the_token() -> None:
    """A step computes eight tokens of a prompt in a second, and the last step's results are there one later."""
    script = part("disaggregated_turns")
    for forgets in (False, True):
        found = script.converse(FakeLLM().engine, SAID, 5, forgets=forgets)
        assert [t.ttft_ms for t in found.turns] == [1000.0 * (-(-t.computed_tokens // 8) + 1) for t in found.turns]


def test_a_new_conversation_finds_nothing_of_the_one_before() -> None:
    script, llm = part("disaggregated_turns"), FakeLLM(prefill="dp=1", decode="dp=1")
    first, second = (script.converse(llm.engine, SAID, 5) for _ in range(2))
    assert first.turns == second.turns


def test_rows_of_turns_are_medians_and_grow_from_the_second_turn() -> None:
    script = part("disaggregated_turns")

    def conversation(scale: float) -> Any:
        turns = [script.Turn(100 * n, 90 * n, 10 + n, 40 * n, scale * n) for n in (1, 2, 4)]
        return script.Conversation(tuple(turns), (), 0.0)

    made = {name: [conversation(scale) for scale in (9.0, 1.0, 2.0)] for name in (script.PAIR, script.ONE, script.COLD)}
    rows = script.rows_of(made)
    assert [row["ttft_ms"][script.PAIR] for row in rows] == [2.0, 4.0, 8.0]
    assert [row["bytes_fetched"] for row in rows] == [40, 80, 160]
    grown = script.growth(rows)
    assert grown["prompt_tokens"] == 2.0 and grown["computed_tokens"][script.ONE] == pytest.approx(14 / 12)
    assert script.lines_of(rows)[-1] == ["from 2", "2.00x", "", "1.17x", "", "2.00x", "2.00x", "2.00x"]


def test_conversations_are_the_same_up_to_the_first_token_that_differs() -> None:
    same_tokens = part("disaggregated_turns").same_tokens
    assert [same_tokens(texts) for texts in ([(1, 2, 3)] * 2, [(1, 2, 3), (1, 2, 3), (1, 5, 3)])] == [3, 1]


def test_turns_print_a_table_or_json_and_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = part("disaggregated_turns")
    monkeypatch.setattr(script, "LLM", FakeLLM)
    monkeypatch.setattr(script, "enable_compilation_cache", lambda: None)
    for as_json in (True, False):
        script.main("some/model", "dp=1", "dp=1", 3, 10, 5, 2, as_json=as_json, out=tmp_path / "out.json")
        printed, written = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
        assert [row["prompt_tokens"] for row in written["rows"]] == [10, 25, 40]
        assert written["same_tokens"] == 45 and written["settings"]["model"] == "model"
        assert not as_json or json.loads(printed) == written
    assert "from 2" in printed and "differ: 45 of 45" in printed


def test_turns_refuse_layouts_that_are_none() -> None:
    script = part("disaggregated_turns")
    with pytest.raises(script.typer.BadParameter, match="dcp=3 must divide"):
        script.main("demo", "pcp=8,dcp=3", "dp=1", 2, 10, 5, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_our_side_of_the_peers_runs_on_the_engines_runner(kind: str, tmp_path: Path) -> None:
    ours = part("ours")
    model = small_model.write_checkpoint(tmp_path / "small")
    job = ours.Job(model=str(model), kind=kind, length=40, batch=2, steps=2, chunk=16, block_size=8, attempts=1)
    row = ours.measure(job)
    assert row["tok_s"] > 0 and row["runs_made"] == 1


def test_a_decode_step_reads_every_weight_but_of_experts_those_that_are_chosen() -> None:
    config = GLMConfig.tiny()
    params = random_params(config, mtp=False)
    least_bytes = part("least").least_bytes
    all_but_embed = sum(x.nbytes for x in jax.tree.leaves(params)) - params.embed.nbytes
    context = config.index_topk + 10
    many = least_bytes(config, params, 10_000, context)
    assert many["weights"] + many["experts"] == pytest.approx(all_but_embed)
    one = least_bytes(config, params, 1, context)
    assert one["weights"] == many["weights"]
    experts = config.num_experts_per_tok / config.n_routed_experts
    assert one["experts"] == pytest.approx(experts * many["experts"])
    assert many["index keys"] == 10_000 * one["index keys"] > 0
    shorter = least_bytes(config, params, 1, config.index_topk)
    assert shorter["index keys"] == 0
    assert shorter["KV rows"] == one["KV rows"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dynamic-slice_bitcast_fusion.10", "layers' weights copied out of their stacks"),
        ("ynn_fusion.3", "matrix products"),
        ("dot.228", "matrix products"),
        ("copy_dot_fusion.1", "matrix products"),
        ("gather_bitcast_fusion", "KV rows and index keys gathered"),
        ("custom-call.2", "top-k, and sorts that only keep a loop on all cores"),
        ("add_rsqrt_fusion.4", "all else: norms, rotation, softmax, masks"),
        ("while.55", ""),
        ("cond.5.clone.7", ""),
        ("ThunkExecutor::Execute", ""),
        ("$profiler.py:471 trace", ""),
        ("PjitFunction(jit(step))", ""),
    ],
)
def test_operations_are_told_by_their_names(name: str, kind: str) -> None:
    assert part("cpu_profile").kind_of(name) == kind
