"""``glmjax kernels``: what it counts, times and prints, and one line for what the user can mend."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_code import needs_plugin
from jax.experimental import topologies

from glmjax import cli, kernel_report
from glmjax.errors import ConfigError
from glmjax.kernel_report import KernelReport, all_cases, as_table, measure_us, report, select_cases
from glmjax.kernels.report_case import Case
from glmjax.kernels.roofline import FLOPS_PER_SECOND

KEYS = {
    *("kernel", "shape", "registers", "stack", "local", "spills", "shared_bytes", "instructions", "bytes", "flops"),
    *("roofline_us", "implementation"),
}
KINDS = ("_hopper", "_triton")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")


@pytest.fixture
def glm(monkeypatch, capsys):
    """Runs a command in this process; gives exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["glmjax", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return (code or 0, *capsys.readouterr())

    return run


def make_case(function=lambda x: x, *arguments, **fields):
    defaults = {
        "kernel": "k",
        "implementation": "hopper",
        "shape": "s",
        "bytes": 1,
        "flops": 1,
        "arithmetic": "float32",
    }
    return Case(function=function, arguments=arguments, **{**defaults, **fields})


def make_report(**fields):
    numbers = dict.fromkeys(["stages", "kernels", "registers", "stack", "local", "spills", "shared_bytes"], 0)
    numbers |= {"threads": 128, "blocks": 132, "bytes": 4_800_000, "host_bytes": 0, "flops": 0, "roofline_us": 1.0}
    return KernelReport(
        **{"kernel": "k", "implementation": "hopper", "shape": "s", "instructions": {}} | numbers | fields
    )


@needs_triton
def test_cases_are_told_apart_and_make_sense():
    cases = all_cases()
    assert len({(case.kernel, case.implementation, case.shape) for case in cases}) == len(cases)
    for case in cases:
        assert case.bytes > 0 and case.flops >= 0 and case.stages >= 1, case
        assert case.arithmetic in FLOPS_PER_SECOND, case
        places = {*case.donate, *case.limits, *case.host_pools}
        assert places <= set(range(len(case.arguments))), case
        assert all(jnp.issubdtype(case.arguments[at].dtype, jnp.integer) for at in case.limits), case


@needs_triton
def test_no_module_is_left_out():
    known = {(case.kernel, case.implementation, case.shape) for case in all_cases()}
    names = {path.stem for path in Path(kernel_report.__file__).parent.glob("kernels/*.py")}
    modules = [importlib.import_module(f"glmjax.kernels.{name}") for name in names if name.endswith(KINDS)]
    with_cases = [module for module in modules if hasattr(module, "cases")]
    assert with_cases
    for module in with_cases:
        assert {(case.kernel, case.implementation, case.shape) for case in module.cases()} <= known, module


@needs_triton
def test_names_are_known_without_triton():
    assert {*kernel_report.KERNELS} == {case.kernel for case in all_cases()}


def test_cases_are_chosen_by_kernel():
    a, b = make_case(kernel="a"), make_case(kernel="b")
    assert select_cases([a, b, a], ["a"]) == (a, a)
    assert select_cases([a, b], []) == (a, b)
    with pytest.raises(ConfigError, match="no kernel 'c', 'd': there are a, b"):
        select_cases([a, b], ["d", "a", "c"])


def test_missing_triton_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("glmjax.kernels.") and name.endswith("_triton")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(sys.modules["glmjax.kernels"], name.rsplit(".", 1)[1], raising=False)
    with pytest.raises(ConfigError, match=r"need Triton.*pip install 'glmjax\[aot\]'"):
        all_cases()


# Times.


def test_time_is_the_mean_of_calls_in_one_program():
    ticks = iter([5.0, 5.0 + 1e-3])
    case = make_case(
        lambda x, i: x[i], jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((9,), jnp.int32)
    )
    assert measure_us(case, lambda: next(ticks)) == pytest.approx(1e3 / kernel_report.REPEATS)
    assert next(ticks, None) is None


def test_arrays_updated_in_place_go_into_the_next_call():
    count = jax.ShapeDtypeStruct((), jnp.int32)
    case = make_case(lambda x, n: (n + 1, x * n), jax.ShapeDtypeStruct((4,), jnp.float32), count, donate=(1,))
    (x, n), (product,) = jax.jit(lambda a: kernel_report._repeat(case, a))((jnp.ones(4), jnp.int32(0)))
    assert n == kernel_report.REPEATS and (x == 1).all()
    assert (product == kernel_report.REPEATS - 1).all()


def test_arguments_to_time_with():
    arguments = [
        jax.ShapeDtypeStruct((1000,), jnp.int32),
        jax.ShapeDtypeStruct((1000,), jnp.int32),
        jax.ShapeDtypeStruct((1000,), jnp.uint8),
        jax.ShapeDtypeStruct((1000,), jnp.bfloat16),
        jax.ShapeDtypeStruct((1000,), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((1000,), jnp.float32),
    ]
    case = make_case(None, *arguments, limits={0: 7}, donate=(5,))
    limited, zero, numbers, wide, narrow, donated = (kernel_report._example(case, at) for at in range(6))
    assert set(np.asarray(limited)) == set(range(7))
    assert not zero.any() and not donated.any()
    for x in (jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn), wide, narrow):
        x = np.asarray(x, np.float32)
        assert np.isfinite(x).all() and len(set(x)) > 20
    assert [x.dtype for x in (numbers, wide, narrow)] == [a.dtype for a in arguments[2:5]]


def test_host_addresses_point_at_memory():
    seen = []

    def read(address):
        jax.debug.callback(lambda x: seen.append(x.tolist()), address)
        return address

    case = make_case(read, jax.ShapeDtypeStruct((2,), jnp.uint32), host_pools={0: 1 << 16})
    measure_us(case, lambda: 0.0)
    ((low, high),) = {tuple(x) for x in seen}
    assert (high << 32 | low) % 16 == 0 and high << 32 | low > 1 << 16


def test_a_cpu_is_not_timed():
    assert not kernel_report.can_measure()


# Tables.


def text_of(table, width=200):
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_table_shows_what_spilled_and_what_was_measured():
    good = make_report(
        kernel="one", registers=168, instructions={"HGMMA": 12, "UTMALDG": 3, "LDSM": 5}, flops=2_500_000_000
    )
    bad = make_report(kernel="two", spills=17, stack=96, measured_us=4.0, host_bytes=200_000, shared_bytes=1536)
    lines = text_of(as_table([good, bad])).splitlines()
    (one,) = (line for line in lines if " one " in line)
    (two,) = (line for line in lines if " two " in line)
    assert [cell.strip() for cell in one.split("│")[1:-1]] == [
        *("one", "s (hopper)", "168", "0", "0.0", "0", "132 x 128", "HGMMA:12 UTMALDG:3", "4.80", "2.5", "1.00", "", "")
    ]
    assert [cell.strip() for cell in two.split("│")[1:-1]] == [
        *("two", "s (hopper)", "0", "17 (96 B)", "1.5", "0", "132 x 128", "", "5.00", "", "1.00", "4.0", "25.0")
    ]
    assert any(set(line) <= set("├┼─┤") for line in lines)  # a line between the kernels


def test_table_without_a_gpu_has_no_columns_for_times():
    assert "measured" not in text_of(as_table([make_report()]))


def test_table_keeps_its_numbers_on_a_narrow_terminal():
    row = make_report(
        shape="a shape of many words that does not fit", blocks=12345, instructions={"HGMMA": 1, "LDGSTS": 2}
    )
    text = text_of(as_table([row]), width=100)
    assert "12345 x 128" in text and "…" not in text


# The command.


@needs_plugin
def test_report_counts_and_json_has_the_promised_keys(glm):
    code, out, _ = glm("kernels", "kv_insert", "--json")
    assert code == 0
    rows = json.loads(out)
    cases = select_cases(all_cases(), ["kv_insert"])
    assert [row["shape"] for row in rows] == [case.shape for case in cases]
    for row, case in zip(rows, cases, strict=True):
        assert set(row) >= KEYS
        assert (row["kernel"], row["implementation"], row["kernels"]) == ("kv_insert", "triton", 1)
        assert (row["bytes"], row["flops"], row["host_bytes"]) == (case.bytes, case.flops, 0)
        assert row["roofline_us"] == pytest.approx(case.bytes / 4.8e6)
        assert row["registers"] > 0 == row["stack"] == row["local"] == row["spills"]
        assert row["measured_us"] is None is row["roofline_percent"]
        assert sum(row["instructions"].values()) > 0


@needs_plugin
def test_report_adds_up_the_kernels_of_an_operation():
    from glmjax.kernels import row_fetch_triton

    once = row_fetch_triton.cases()[0]

    def twice(*arguments):
        *pools, address, to, of = arguments
        return once.function(*once.function(*pools, address, to, of), address, of, to)

    single, double = report(once), report(make_case(twice, *once.arguments, donate=once.donate))
    assert (single.kernels, double.kernels) == (1, 2)
    assert double.instructions == {name: 2 * n for name, n in single.instructions.items()}
    assert (double.registers, double.blocks, double.threads) == (single.registers, single.blocks, single.threads)


@needs_plugin
def test_command_prints_a_table(glm, monkeypatch):
    cases = select_cases(all_cases(), ["kv_insert"])[-2:]
    monkeypatch.setattr(kernel_report, "all_cases", lambda: cases)
    code, out, err = glm("kernels", "kv_insert")
    assert code == 0 and "Compiling: 2 kernels" in err
    assert "T=2048 latent, rope bf16" in out and "LDGSTS:" in out and "4.8 TB/s" in out


@needs_plugin
def test_command_times_with_a_gpu_and_not_if_told(glm, monkeypatch):
    cases = select_cases(all_cases(), ["kv_insert"])[:1]
    monkeypatch.setattr(kernel_report, "all_cases", lambda: cases)
    monkeypatch.setattr(kernel_report, "can_measure", lambda: True)
    monkeypatch.setattr(kernel_report, "measure_us", lambda case, clock: 2.0)
    (row, *_) = json.loads(glm("kernels", "kv_insert", "--json")[1])
    assert row["measured_us"] == 2.0 and row["roofline_percent"] == pytest.approx(50 * row["roofline_us"])
    (row, *_) = json.loads(glm("kernels", "kv_insert", "--json", "--no-measure")[1])
    assert row["measured_us"] is None


def test_unknown_kernel_is_one_line_and_exit_2(glm, monkeypatch):
    monkeypatch.setattr(kernel_report, "all_cases", lambda: pytest.fail("needs Triton, which may not be there"))
    code, out, err = glm("kernels", "flash")
    assert (code, out) == (2, "")
    assert err.startswith("glmjax: no kernel 'flash': there are ") and err.count("\n") == 1


@needs_triton
def test_missing_plugin_is_one_line_and_exit_2(glm, monkeypatch):
    def without_plugin(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", without_plugin)
    kernel_report.h200_mesh.cache_clear()
    code, out, err = glm("kernels", "kv_insert")
    assert (code, out) == (2, "")
    assert "pip install 'glmjax[aot]'" in err and err.count("\n") == 1
