"""``glmjax bench hisparse``: traces drawn and recorded, what the hot region makes of them, and the command."""

import dataclasses
import functools
import itertools
import json
import sys

import drafting_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_glm
import typer
from hypothesis import given
from hypothesis import strategies as st

from glmjax import cli
from glmjax.batch import contiguous_batch
from glmjax.cache import make_cache
from glmjax.config import GLMConfig
from glmjax.errors import ConfigError
from glmjax.hisparse_bench import default_buffers, draw, measure, save_figure
from glmjax.hisparse_trace import Trace, group_layers, load_trace, record, save_trace, synthetic
from glmjax.kernels.resolve_rows import resolve_rows_numpy
from glmjax.model import logits, run_layers
from glmjax.mtp import mtp_layer
from glmjax.sharding.layout import ONE_DEVICE
from glmjax.share import share_of

MODELS = {
    "tiny_glm": lambda: (*tiny_glm.checkpoint(), tiny_glm.recorded()["input_ids"][0].tolist()),
    "drafting": lambda: (drafting_model.CONFIG, drafting_model.params(), [*range(3, 60, 2)]),
}
SMALL = {"k": 8, "queries": 2, "steps": 24, "shared": 0.5, "row_bytes": 100, "seed": 1}


def trace_of(*steps, lengths=None, layers=(3,), row_bytes=10):
    """One group; a step is a list of rows."""
    selections = np.array(steps, np.int32)[:, None]
    lengths = [9] * len(steps) if lengths is None else lengths
    return Trace(selections, np.array(lengths, np.int32), layers, row_bytes, "by hand")


def drawn(overlap, **changes):
    return synthetic(100, layers=(1, 4), overlap=overlap, **(SMALL | changes))


@functools.cache
def recorded(queries, model="tiny_glm"):
    config, params, prompt = MODELS[model]()
    return record(params, config, prompt, steps=12, queries=queries, name=model)


def misses(trace, buffers=None):
    return [one.misses for one in measure(trace, default_buffers(trace) if buffers is None else buffers)]


def positions_of(rows):
    return [set(row[row >= 0].tolist()) for row in rows]


# Measured.


def test_hits_misses_and_bytes_of_an_example_by_hand():
    """Top-2: 0 1 | 1 2 | 3 0 | 1 2, with room for 2, 3 and 4 rows."""
    trace = trace_of([[0, 1]], [[1, 2]], [[3, 0]], [[1, 2]])
    two, three, four = measure(trace, [4, 2, 3, 2])
    assert [one.buffer for one in (two, three, four)] == [2, 3, 4]
    assert [(one.hits, one.misses) for one in (two, three, four)] == [(1, 7), (3, 5), (4, 4)]
    # Three rows: after two steps 0 1 2 | 0 is there, 3 takes the place of 2, which ranks before the hit 1 | 1, not 2.
    assert three.num_bytes == 5 * 10 * 3 and three.bytes_per_step == 37.5 and three.misses_per_step == 1.25
    assert three.hit_rate == 0.375 and three.buffer_bytes == 3 * 10 * 3
    assert three.host_ms_per_step == pytest.approx(1e3 * 37.5 / 63e9)


def test_what_several_rows_want_is_one_miss_and_then_hits():
    (one,) = measure(trace_of([[4, 5], [5, 4]], [[-1, -1], [4, 6]]), [4])
    assert (one.hits, one.misses) == (3, 3)


def test_positions_that_a_step_writes_anew_are_not_there_any_more():
    """A draft at 10 is rejected, and the next step computes position 10 again."""
    rejected, accepted = (trace_of([[9, 1], [10, 1]], [[10, 1], [2, 1]], lengths=[9, n]) for n in (10, 11))
    assert (misses(rejected, [4]), misses(accepted, [4])) == ([5], [4])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "queries"), [("tiny_glm", 1), ("drafting", 4)])
def test_bytes_are_misses_times_row_bytes_times_layers(model, queries):
    """Group by group, against the resolver's NumPy twin."""
    trace = recorded(queries, model)
    size = 2 * trace.least_rows
    (one,) = measure(trace, [size])
    hits, num_missed = 0, np.zeros(len(trace.layers), int)
    for group in range(len(trace.layers)):
        owner, order = np.full((1, size), -1, np.int32), np.arange(size, dtype=np.int32)[None]
        for step, length in enumerate(trace.lengths):
            selected = trace.selections[step, group].reshape(1, -1)
            all_of_them, written = np.ones(selected.shape, bool), np.array([length])
            found = resolve_rows_numpy(
                selected, all_of_them, owner, order, first_written=written, context=trace.context
            )
            owner, order = found.owner, found.order
            hits += int(found.hits[0])
            num_missed[group] += int(found.misses[0])
    assert (one.hits, one.misses) == (hits, num_missed.sum())
    assert one.hits + one.misses == (trace.selections >= 0).sum()
    layers, row_bytes = ((1, 1, 4, 1), 4 * (64 + 16)) if model == "tiny_glm" else ((1, 2, 1), 4 * (16 + 8))
    assert one.num_bytes == sum(row_bytes * n * missed for n, missed in zip(layers, num_missed, strict=True))
    assert one.buffer_bytes == row_bytes * sum(layers) * size


TRACES = {
    "recorded": lambda: recorded(1),
    "recorded with drafts": lambda: recorded(4, "drafting"),
    **{f"overlap {x}": functools.partial(drawn, x) for x in (0.0, 0.5, 0.8, 1.0)},
}


@pytest.mark.parametrize("name", TRACES)
def test_hit_rate_never_falls_as_the_buffer_grows(name):
    """And with room for the whole context only a position's first reference is a miss."""
    trace = TRACES[name]()
    results = measure(trace, default_buffers(trace))
    rates = [one.hit_rate for one in results]
    assert rates == sorted(rates) and len(rates) >= 3
    distinct = sum(len(np.unique(group[group >= 0])) for group in trace.selections.transpose(1, 0, 2, 3))
    if name == "recorded with drafts":  # rejected ones are computed again
        assert results[-1].misses >= distinct
    else:
        assert results[-1].misses == distinct
    if name == "overlap 1.0":
        assert rates[-1] == rates[0]
    else:
        assert rates[-1] > rates[0] + 0.02, rates


@given(data=st.data())
def test_no_trace_is_found_whose_misses_rise_with_the_buffer(data):
    """Also where drafts are rejected: a step may start anywhere after the one before."""
    lengths = np.cumsum([8, *data.draw(st.lists(st.integers(1, 2), min_size=8, max_size=8))], dtype=np.int32)
    lengths = np.minimum(lengths, 20)
    lengths[-1] = 20  # the same shapes each time
    rows = st.permutations(range(22)).map(lambda x: x[:3])
    steps = np.array(data.draw(st.lists(st.tuples(rows, rows), min_size=9, max_size=9)), np.int32)
    steps[steps > lengths[:, None, None] + np.arange(2)[:, None]] = -1
    found = misses(trace_of(*steps, lengths=lengths), [6, 7, 8, 10, 22])
    assert found == sorted(found, reverse=True)


def test_hit_rate_rises_with_overlap():
    rates = [[one.hit_rate for one in measure(drawn(x), [16, 32, 64])] for x in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for lower, higher in itertools.pairwise(rates):
        assert all(b > a for a, b in zip(lower, higher, strict=True)), rates


def test_default_buffers_go_from_one_step_to_the_whole_context():
    assert default_buffers(drawn(0.5)) == [16, 24, 32, 48, 64, 96, 125]
    assert default_buffers(trace_of([[0, 1]], lengths=[1])) == [2]
    assert default_buffers(trace_of([[0, 1, -1, -1]], lengths=[1])) == [2]


@pytest.mark.parametrize(
    ("buffers", "message"),
    [([], "at least one size"), ([15, 64], "buffers: 15 rows .* at least 16"), ([1 << 40], "more than any context")],
)
def test_a_buffer_that_cannot_work_is_named(buffers, message):
    with pytest.raises(ConfigError, match=message):
        measure(drawn(0.5), buffers)


# Drawn.


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_a_drawn_trace_has_the_overlap_that_was_asked_for(overlap, shared):
    """k=8: every part of it is a whole number of positions; and every row by itself has it."""
    trace = drawn(overlap, shared=shared)
    assert trace.overlap() == overlap and trace.shared() == shared
    for step in range(trace.steps):
        for group in range(2):
            rows = positions_of(trace.selections[step, group])
            assert all(len(row) == 8 and max(row) < trace.lengths[step] for row in rows)
            assert len(rows[0] & rows[1]) == 8 * shared
            if step:
                before = positions_of(trace.selections[step - 1, group])
                assert [len(a & b) for a, b in zip(before, rows, strict=True)] == [8 * overlap] * 2
    np.testing.assert_array_equal(trace.lengths, 100 + np.arange(24))


def test_a_drawn_trace_follows_its_seed_and_groups_differ():
    first, again, other = drawn(0.5), drawn(0.5), drawn(0.5, seed=2)
    np.testing.assert_array_equal(first.selections, again.selections)
    assert (first.selections != other.selections).any()
    assert (first.selections[:, 0] != first.selections[:, 1]).any()


def test_new_positions_come_from_the_whole_context():
    counts = np.bincount(drawn(0.0, steps=400, seed=3).selections.reshape(-1), minlength=400)[:100]
    assert counts.min() > 0 and counts[:50].sum() == pytest.approx(counts[50:].sum(), rel=0.1)


def test_overlap_is_measured_by_hand():
    trace = trace_of([[1, 2], [2, 3]], [[2, 5], [5, -1]])
    assert trace.overlap() == 0.5 and trace.shared() == 0.75
    assert trace_of([[1, 2]]).overlap() == 0 and trace_of([[1, 2]]).shared() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 1.5}, r"overlap must be in \[0, 1\], got 1.5"),
        ({"overlap": float("nan")}, "overlap must be .* got nan"),
        ({"shared": -1}, r"shared must be in \[0, 1\], got -1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"k": 60}, "context=100 is too short: .* give at least 135"),
    ],
)
def test_values_that_cannot_be_drawn_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        drawn(**({"overlap": 0.5} | changes))


# Recorded.


@functools.cache
def whole_sequence(model):
    """Greedy continuation by whole forward passes: what trunk and MTP layer select at each position [groups, S, K]."""
    config, params, prompt = MODELS[model]()
    length = len(prompt) + 48
    share = share_of(contiguous_batch(jnp.zeros((1, length), jnp.int32)), ONE_DEVICE)

    @jax.jit
    def trunk(tokens):
        cache = make_cache(config, 1, length, "float32", mtp=True)
        cache, hidden, chosen = run_layers(params, config, cache, dataclasses.replace(share, tokens=tokens))
        return cache, hidden, chosen, jnp.argmax(logits(params, hidden), axis=-1)

    @jax.jit
    def selected_by_mtp(cache, hidden, tokens):
        return mtp_layer(params, config, cache, hidden, dataclasses.replace(share, tokens=tokens))[2]

    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), length):
        cache, hidden, chosen, best = trunk(tokens)
        tokens[0, place] = best[place - 1]
    cache, hidden, chosen, best = trunk(tokens)
    following = np.roll(tokens, -1, axis=1)
    following[0, -1] = best[-1]
    return np.concatenate([chosen, selected_by_mtp(cache, hidden, following)[None]])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "queries"), [("tiny_glm", 1), ("drafting", 4)])
def test_recorded_positions_are_those_of_whole_forward_passes(model, queries):
    (config, _, prompt), trace, chosen = MODELS[model](), recorded(queries, model), whole_sequence(model)
    groups = config.num_full_indexers + (queries > 1)
    assert trace.selections.shape == (12, groups, queries, 8) and trace.lengths[0] == len(prompt)
    accepted = np.diff(trace.lengths, append=trace.lengths[-1] + 1)
    assert accepted.min() >= 1 and accepted.max() <= queries
    for step, (start, count) in enumerate(zip(trace.lengths, accepted, strict=True)):
        for group, rows in enumerate(trace.selections[step]):
            assert positions_of(rows[:count]) == positions_of(chosen[group, start : start + count])
    if queries > 1:  # drafts that were rejected leave the MTP layer nothing to select for
        rows = trace.selections[:-1, -1]
        np.testing.assert_array_equal((rows >= 0).any(-1), np.arange(queries) < accepted[:-1, None])
    if model == "drafting":
        assert len({*accepted.tolist()}) >= 3, accepted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"prompt": []}, "tokens in the prompt must be at least 1, got 0"),
        ({"steps": 4096}, "may take 4144 positions, and a model has 4096"),
        ({"queries": 2, "mtp": None}, "queries=2 needs 1 drafts a step, and a model has no MTP layer"),
    ],
)
def test_what_cannot_be_recorded_is_named(arguments, message):
    config, params, prompt = MODELS["tiny_glm"]()
    if "mtp" in arguments:
        params = dataclasses.replace(params, mtp=arguments["mtp"])
    values = {"prompt": prompt, "steps": 1, "queries": 1} | arguments
    with pytest.raises(ConfigError, match=message):
        record(params, config, values["prompt"], steps=values["steps"], queries=values["queries"])


def test_groups_of_glm_5_3():
    config = GLMConfig.glm_5_3()
    assert group_layers(config, mtp=False) == (1, 1, *[4] * 19)
    assert group_layers(config, mtp=True) == (1, 1, *[4] * 19, 1)


# Files.


def test_a_trace_comes_back_from_its_file(tmp_path):
    trace, path = recorded(4, "drafting"), tmp_path / "trace.npz"
    path.write_text("an older file")
    save_trace(trace, path)
    copy = load_trace(path)
    for field in dataclasses.fields(Trace):
        np.testing.assert_array_equal(getattr(copy, field.name), getattr(trace, field.name))
    assert copy.layers == trace.layers and copy.row_bytes == trace.row_bytes
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


def test_files_that_hold_no_trace_are_named(tmp_path):
    path = tmp_path / "trace.npz"
    with pytest.raises(ConfigError, match=r"trace\.npz not found"):
        load_trace(path)
    path.write_text("no")
    with pytest.raises(ConfigError, match=r"trace\.npz is not a trace"):
        load_trace(path)
    save_trace(drawn(0.5), path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"trace\.npz is not a trace"):
        load_trace(path)
    np.savez(path, selections=np.zeros((1, 1, 1, 1), np.int32))
    with pytest.raises(ConfigError, match="lengths"):
        load_trace(path)
    fields = {field.name: getattr(drawn(0.5), field.name) for field in dataclasses.fields(Trace)}
    np.savez(path, **(fields | {"lengths": fields["lengths"] - 50}))
    with pytest.raises(ConfigError, match=r"trace\.npz: .* step 0, group 0, query 0"):
        load_trace(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        save_trace(drawn(0.5), tmp_path / "nowhere" / "trace.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selections": np.zeros((1, 1, 2), np.int32)}, "selections must be int32"),
        ({"selections": np.zeros((1, 1, 1, 2))}, "selections must be int32"),
        ({"selections": np.full((1, 1, 1, 2), -2, np.int32)}, "query 0 has -2"),
        ({"lengths": np.zeros(2, np.int32)}, "lengths must be 1 int32"),
        ({"layers": (1, 2)}, "layers must be 1 numbers"),
        ({"row_bytes": 0}, "row_bytes must be at least 1, got 0"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(trace_of([[0, 1]]), **changes)


# The command.


@pytest.fixture
def glm(monkeypatch, capsys):
    """Runs ``glmjax bench hisparse``; gives exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["glmjax", "bench", "hisparse", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return (code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "trace.npz"
    save_trace(drawn(0.75), path)
    return path


def test_the_table_has_what_was_measured(glm, saved):
    code, out, err = glm("--trace", saved, "--buffers", "48,16")
    assert (code, err) == (0, "")
    results = measure(load_trace(saved), [16, 48])
    rows = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [
            str(one.buffer),
            f"{one.buffer_bytes / 1e6:.2f}",
            f"{100 * one.hit_rate:.2f}",
            f"{one.misses_per_step:.1f}",
            f"{one.bytes_per_step / 1e6:.3f}",
            f"{one.host_ms_per_step:.4f}",
        ]
        for one in results
    ]
    assert "24 steps of 2 x top-8" in out and "overlap 0.750, shared 0.500" in out


def test_json_has_what_was_measured_and_nothing_else(glm, saved):
    code, out, _ = glm("--trace", saved, "--json")
    trace = load_trace(saved)
    assert code == 0
    assert json.loads(out) == [one.as_json() for one in measure(trace, default_buffers(trace))]
    first = json.loads(out)[0]
    assert first["buffer"] == 16 and first["bytes_per_step"] * first["steps"] == first["num_bytes"]


@pytest.mark.slow
def test_selections_are_drawn_at_the_sizes_of_glm_5_3(glm, tmp_path):
    path = tmp_path / "drawn.npz"
    drawing = ["--overlap", "0.5", "--context", "512", "--steps", "3", "--k", "32", "--queries", "2", "--shared", "1"]
    code, out, _ = glm(*drawing, "--json", "--save-trace", path)
    trace = load_trace(path)
    assert code == 0 and json.loads(out)[0]["buffer"] == 64
    assert trace.selections.shape == (3, 22, 2, 32) and sum(trace.layers) == 79 and trace.row_bytes == 656
    assert trace.overlap() == 0.5 and trace.shared() == 1


@pytest.mark.slow
def test_a_checkpoint_is_recorded(glm, tmp_path):
    """As served by default: bfloat16, FP8 rows of 64 values, a scale and 16 rotary ones."""
    path = tmp_path / "recorded.npz"
    recording = ["--model", tiny_glm.FOLDER, "--prompt-len", "20", "--steps", "3", "--k", "4"]
    code, out, err = glm(*recording, "--save-trace", path, "--plot", tmp_path / "plot.svg")
    trace = load_trace(path)
    assert (code, err) == (0, "") and "20 tokens of prompt" in out
    assert trace.selections.shape == (3, 4, 1, 4) and trace.row_bytes == 64 + 4 + 2 * 16
    np.testing.assert_array_equal(trace.lengths, [20, 21, 22])
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1


def test_the_picture_shows_what_was_measured(tmp_path):
    trace = drawn(0.75)
    results = measure(trace, [16, 32, 64])
    figure = draw(trace, results)
    rate, traffic = (ax.lines[0].get_xydata() for ax in figure.axes)
    np.testing.assert_allclose(rate, [(one.buffer, 100 * one.hit_rate) for one in results])
    np.testing.assert_allclose(traffic, [(one.buffer, one.bytes_per_step / 1e6) for one in results])
    save_figure(figure, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--buffers", "16,x"], "--buffers must be numbers of rows with commas between them, such as 4096,8192, got "),
        (["--buffers", "0"], "--buffers must be numbers of rows"),
        (["--buffers", "8"], "buffers: 8 rows do not hold what a step may want, 16 (2 rows of k=8 in 125 tokens): "),
        (["--overlap", "0.5"], "--overlap does not go with --trace: leave one of them out"),
        (["--steps", "3"], "--steps does not go with --trace"),
        (["--plot", "plot.docx"], "plot.docx: the picture's name must end with one of ."),
    ],
)
def test_a_bad_value_beside_a_trace_is_one_line_and_exit_code_2(glm, saved, options, message):
    code, out, err = glm("--trace", saved, *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(f"glmjax: {message}"), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "nowhere.npz"], "nowhere.npz not found"),
        (["--overlap", "2"], "overlap must be in [0, 1], got 2"),
        (["--overlap", "0.5", "--model", "demo"], "--model does not go with --overlap"),
        (["--overlap", "0.5", "--context", "2000"], "context=2000 is too short"),
        (["--overlap", "0.5", "--context", "1048576"], "--context 1048576 and 128 steps are more than the model's "),
        (["--context", "4096"], "--context does not go with a recording (use --overlap to draw)"),
        (["--model", "nowhere"], "nowhere not found"),
        (["--queries", "9"], "--queries must be in [1, 8], got 9"),
        (["--k", "0"], "--k must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--prompt-len", "0"], "--prompt-len must be at least 1, got 0"),
        (["--model", tiny_glm.FOLDER, "--prompt-len", "4000"], "a prompt of 4000 tokens and 128 steps of up to 1 may"),
    ],
    ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, list) else None,
)
def test_a_bad_value_is_one_line_and_exit_code_2(glm, options, message):
    code, out, err = glm(*options)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(f"glmjax: {message}"), err


def test_a_large_model_is_refused_before_it_is_read(glm, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLMConfig.glm_5_3().to_hf()))
    code, _, err = glm("--model", tmp_path)
    assert code == 2 and "GB of weights, and recording runs on one device" in err


def test_every_option_has_a_line_of_help(glm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    command = typer.main.get_command(cli.app).commands["bench"].commands["hisparse"]
    code, out, _ = glm("--help")
    assert code == 0 and command.help
    for option in command.params:
        assert option.help and option.help in out and option.opts[0] in out, option.name
