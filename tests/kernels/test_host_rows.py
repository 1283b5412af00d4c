"""Rows out of a pool in host memory and pages into it: against NumPy, on several devices, in place, and for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_code import check_code, needs_plugin
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glmjax.errors import ConfigError
from glmjax.kernel_report import h200_mesh
from glmjax.kernels.host_rows import host_rows, write_pages
from glmjax.kernels.machine_code import machine_code
from glmjax.kernels.row_format import HostRows
from glmjax.sharding import hlo
from glmjax.sharding.aot import compile_for_h200

L, S, SIZE, PAGE = 5, 48, 656, 4
SLOTS = np.array([7, -1, 0, 47, 7, -1, 12], np.int32)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8)


def mesh_of(count):
    return jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


PARTS = P(None, "x")  # of a pool: each device has slots of its own


def on_host(data, devices=1):
    """A pool in memory of XLA's own: ``jax.device_put`` may leave it in NumPy's, which no program takes over."""
    place = NamedSharding(mesh_of(devices), PARTS, memory_kind="pinned_host")
    return jax.jit(jnp.copy, out_shardings=place)(data)


def expected(data, layer, count, slots):
    rows = data[layer : layer + count][:, slots]
    rows[:, slots < 0] = 0
    return rows


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize(("layer", "count"), [(0, L), (3, 2), (4, 1)])
def test_rows_of_a_pool(implementation, layer, count):
    data = noise(L, S, SIZE)
    fetch = jax.jit(host_rows, static_argnums=2, static_argnames="implementation")
    found = fetch(on_host(data), jnp.int32(layer), count, SLOTS, implementation=implementation)
    assert found.sharding.memory_kind == "device" and found.dtype == jnp.uint8
    assert (np.asarray(found) == expected(data, layer, count, SLOTS)).all()


def test_layer_may_be_a_number_and_slots_none_at_all():
    data = noise(L, S, SIZE)
    pool = on_host(data)
    assert (host_rows(pool, 2, 2, jnp.asarray(SLOTS)) == expected(data, 2, 2, SLOTS)).all()
    assert not host_rows(pool, 2, 2, jnp.full(3, -1, jnp.int32)).any()
    assert host_rows(pool, 2, 2, jnp.zeros(0, jnp.int32)).shape == (2, 0, SIZE)


def scanned_rows(pool, slots):
    """[L - 1, 2, M, SIZE]: two layers at a time out of one device's part of a pool."""
    return jax.lax.scan(lambda none, layer: (none, host_rows(pool, layer, 2, slots)), None, jnp.arange(L - 1))[1]


@pytest.mark.parametrize("devices", [1, 4])
def test_each_device_reads_its_own_part_in_a_scan(devices):
    data = noise(L, devices * S, SIZE)
    slots = np.random.default_rng(1).integers(-1, S, (devices, 9)).astype(np.int32)
    pool = on_host(data, devices)
    mesh = pool.sharding.mesh
    read = jax.shard_map(
        lambda pool, slots: scanned_rows(pool, slots[0]),
        mesh=mesh,
        in_specs=(PARTS, P("x")),
        out_specs=P(None, None, "x"),
    )
    # Compiled ahead of time, as the engine does.
    abstract = (
        jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=pool.sharding),
        jax.ShapeDtypeStruct(slots.shape, slots.dtype, sharding=NamedSharding(mesh, P("x"))),
    )
    program = jax.jit(read).lower(*abstract).compile()
    found = np.asarray(program(pool, jax.device_put(slots, abstract[1].sharding)))
    for d in range(devices):
        part = data[:, d * S : (d + 1) * S]
        for layer in range(L - 1):
            assert (found[layer, :, d * 9 : (d + 1) * 9] == expected(part, layer, 2, slots[d])).all()


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("slots", [SLOTS, np.full(3, -1, np.int32), np.zeros(0, np.int32)], ids=["some", "-1", "none"])
def test_rows_by_address(monkeypatch, layer, slots):
    pytest.importorskip("triton")
    from triton_interpreter import interpreted_call

    from glmjax.kernels import row_fetch_triton

    monkeypatch.setattr(row_fetch_triton, "triton_call", interpreted_call)
    memory = noise(L * S + 1, SIZE).reshape(-1)
    first = -memory.ctypes.data % 16
    data = memory[first : first + L * S * SIZE].reshape(L, S, SIZE)
    pool = HostRows.at(data.ctypes.data, SIZE)
    found = host_rows(pool, layer, 2, jnp.asarray(slots), slots_per_layer=S, implementation="address")
    assert found.shape == (2, len(slots), SIZE) and (found == expected(data, layer, 2, slots)).all()


def written(data, rows, slots):
    data = data.copy()
    for page, slot in enumerate(slots):
        if slot >= 0:
            data[:, slot : slot + PAGE] = rows[:, page]
    return data


def check_written(data, rows, slots):
    """``rows`` and ``slots`` with the devices first, for as many parts of the pool."""
    devices = len(slots)
    pool = on_host(data, devices)
    pointers = [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards]
    write = jax.shard_map(
        lambda pool, rows, slots: write_pages(pool, rows[0], slots[0]),
        mesh=pool.sharding.mesh,
        in_specs=(PARTS, P("x"), P("x")),
        out_specs=PARTS,
    )
    new = jax.jit(write, donate_argnums=0, out_shardings=pool.sharding)(pool, rows, slots)
    assert pool.is_deleted() and new.sharding.memory_kind == "pinned_host"
    assert [shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards] == pointers
    parts = np.split(data, devices, axis=1)
    wanted = [written(*part) for part in zip(parts, rows, slots, strict=True)]
    assert (np.asarray(new) == np.concatenate(wanted, axis=1)).all()


@pytest.mark.parametrize("slots", [[8], [-1], [0, 44, 13], [-1, 20, -1, 4, -1], [-1, -1]], ids=str)
def test_pages_are_written_in_place_and_others_left(slots):
    check_written(noise(L, S, SIZE), noise(1, L, len(slots), PAGE, SIZE, seed=2), np.array([slots], np.int32))


def test_each_device_writes_its_own_part():
    slots = np.array([[0, 8], [-1, -1], [44, -1], [-1, 5]], np.int32)
    check_written(noise(L, 4 * S, SIZE), noise(4, L, 2, PAGE, SIZE, seed=2), slots)


ADDRESS = HostRows.at(1 << 40, SIZE)


@pytest.mark.parametrize(
    ("pool", "options", "message"),
    [
        ("host", {"implementation": "triton"}, "implementation='triton' of host_rows: give 'auto', 'xla' or 'address'"),
        ("host", {"implementation": "address"}, "given as an array goes with implementation='xla'"),
        ("host", {"slots_per_layer": S}, "given as an array goes with .* slots_per_layer=48"),
        ("host", {"stream": 1}, "given as an array goes with .* stream=1"),
        ("device", {}, "host_rows: a pool in memory space Device, and not in host memory"),
        (ADDRESS, {"implementation": "xla", "slots_per_layer": S}, "by address .* goes with implementation='address'"),
        (ADDRESS, {}, "by address .* slots_per_layer=None"),
        (ADDRESS, {"slots_per_layer": S}, "rows in host memory need a GPU"),
    ],
)
def test_what_is_refused(pool, options, message):
    if isinstance(pool, str):
        pool = on_host(noise(L, S, SIZE)) if pool == "host" else jnp.zeros((L, S, SIZE), jnp.uint8)
    with pytest.raises(ConfigError, match=message):
        host_rows(pool, 0, 1, jnp.asarray(SLOTS), **options)


def test_pages_are_not_written_to_device_memory():
    with pytest.raises(ConfigError, match="write_pages: a pool in memory space Device"):
        write_pages(jnp.zeros((L, S, SIZE), jnp.uint8), jnp.zeros((L, 1, PAGE, SIZE), jnp.uint8), jnp.zeros(1, int))


LARGE, ROWS, COUNT = 1 << 18, 2048, 4  # slots of a layer, rows, layers


def beside_matmuls(fetch, x, w):
    """What a fetch returns, and two products that do not need it."""
    return fetch(), jnp.tanh(x @ w) @ w


def abstract(*shapes):
    place = NamedSharding(h200_mesh(), P())
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]


MATRICES = [((256, 4096), jnp.bfloat16), ((4096, 4096), jnp.bfloat16)]
BY_ADDRESS = [((2,), jnp.uint32), ((), jnp.int32), ((ROWS,), jnp.int32), *MATRICES]


def pairs(text, opcode):
    """For each pair of ``opcode``-start and -done of scheduled HLO, the numbers of matmuls between them."""
    found = []
    for lines in hlo.parse(text).computations.values():
        for at, line in enumerate(lines):
            if line.opcode == f"{opcode}-start":
                rest = lines[at + 1 :]
                (end,) = [i for i, x in enumerate(rest) if x.opcode == f"{opcode}-done" and line.name in x.operands]
                found.append(sum("dot" in x.name and x.is_compute for x in rest[:end]))
    return found


@needs_plugin
def test_xla_reads_on_the_host_beside_the_gpu():
    def program(pool, layer, slots, x, w):
        return beside_matmuls(lambda: host_rows(pool, layer, COUNT, slots), x, w)

    arguments = abstract(((8, 4096, SIZE), jnp.uint8), *BY_ADDRESS[1:])
    compiled = compile_for_h200(program, *arguments, mesh=h200_mesh(), on_host=(0,))
    assert compiled.host_memory.arguments == 8 * 4096 * SIZE
    assert compiled.hlo.count('custom_call_target="HostExecute"') == 1
    assert pairs(compiled.hlo, "custom-call") == [2]


@needs_plugin
def test_address_is_read_by_the_kernel():
    def program(address, layer, slots):
        pool = HostRows(address, SIZE)
        return host_rows(pool, layer, COUNT, slots, slots_per_layer=LARGE, implementation="address")

    compiled = compile_for_h200(program, *abstract(*BY_ADDRESS[:3]), mesh=h200_mesh())
    (code,) = [code for code in machine_code(compiled.executable) if code.blocks is not None]
    check_code(code, "LDGSTS", "STG.E.128")
    rows = COUNT * ROWS
    assert compiled.memory.outputs == rows * SIZE and compiled.memory.temporaries < 16 * rows
    assert "call-start" not in compiled.hlo


@needs_plugin
def test_addresses_are_read_beside_the_rest_on_a_stream_of_their_own():
    """An index group of HiSparse in a scan: its leader's rows, and those of its followers while the leader computes."""

    def attend(x, rows, w):
        """Stands for a layer: a product, one with its rows, another."""
        keys = jnp.tanh(rows.astype(jnp.bfloat16))
        return jnp.pad(jnp.tanh(x @ w)[:, :SIZE] @ keys.T, ((0, 0), (0, w.shape[0] - ROWS))) @ w

    def program(address, layer, slots, x, w):
        read = functools.partial(host_rows, slots_per_layer=LARGE, stream=1, implementation="address")

        def group(x, layer):
            (leader,) = read(HostRows(address, SIZE), layer, 1, slots)
            followers = read(HostRows(address, SIZE), layer + 1, COUNT - 1, slots)
            for rows in (leader, *followers):
                x = attend(x, rows, w)
            return x, None

        return jax.lax.scan(group, x, layer + COUNT * jnp.arange(4, dtype=jnp.int32))

    compiled = compile_for_h200(program, *abstract(*BY_ADDRESS), mesh=h200_mesh())
    assert sorted(pairs(compiled.hlo, "call")) == [1, 4]  # the leader's first product; all of its three, and the next
    assert machine_code(compiled.executable)


@needs_plugin
def test_rows_of_several_streams_do_not_share_memory():
    """XLA copies no argument that such a call writes to: it must have none."""

    def program(address, layer, slots):
        read = functools.partial(host_rows, slots_per_layer=LARGE, implementation="address")
        return [read(HostRows(address, SIZE), layer + i, 1, slots, stream=i).max(axis=-1) for i in (1, 2)]

    compiled = compile_for_h200(program, *abstract(*BY_ADDRESS[:3]), mesh=h200_mesh())
    starts = [x for lines in hlo.parse(compiled.hlo).computations.values() for x in lines if x.opcode == "call-start"]
    assert len(starts) == 2
    for line in starts:
        *arguments, result = [shape.bytes for shape in line.shapes]
        assert result == ROWS * SIZE and result not in arguments


@needs_plugin
def test_pages_go_to_host_memory_in_place_on_an_h200():
    layers, slots, page = 8, 4096, 64
    shapes = [((layers, slots, SIZE), jnp.uint8), ((layers, 16, page, SIZE), jnp.uint8), ((16,), jnp.int32)]
    program = compile_for_h200(write_pages, *abstract(*shapes), mesh=h200_mesh(), donate=(0,), on_host=(0,))
    there = program.host_memory
    assert there.arguments == there.aliased == layers * slots * SIZE
    assert there.temporaries == 0
    assert program.memory.temporaries < 2 * layers * page * SIZE  # a page on its way
    assert "dynamic-update-slice-start" in program.hlo and "HostExecute" not in program.hlo
