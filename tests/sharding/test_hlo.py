"""HLO reading: programs compiled here for eight CPU devices, and excerpts of programs compiled for H200.

The excerpts are what XLA printed (jax 0.12.0.1), cut down to the lines and attributes that are read.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glmjax.sharding import hlo

# A scan that gathers the KV of layer i+1 while layer i attends, over the first axis of a 4x2 mesh.
PIPELINED = """\
HloModule jit_pipelined, is_scheduled=true, num_partitions=8
%scores (param_0: bf16[1024,576], param_1: bf16[8192,576]) -> bf16[1024,8192] {
  %param_0 = bf16[1024,576]{1,0} parameter(0)
  %param_1 = bf16[8192,576]{1,0} parameter(1)
  ROOT %dot_general.10 = bf16[1024,8192]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}
%fused_add.1 (param_0.23: s32[]) -> s32[] {
  %param_0.23 = s32[] parameter(0)
  ROOT %add.11.1 = s32[] add(%param_0.23, %param_0.23)
}
%region_0.3 (param: (s32[], bf16[1024,576], /*index=5*/bf16[6,2048,576])) -> (s32[], bf16[1024,576]) {
  %param = (s32[], bf16[1024,576]{1,0}, bf16[8192,576]{1,0}, /*index=5*/bf16[6,2048,576]{2,1,0}) parameter(0)
  %get-tuple-element.41 = s32[] get-tuple-element(%param), index=0
  %get-tuple-element.43 = bf16[8192,576]{1,0} get-tuple-element(%param), index=2
  %gemm_fusion_dot.6 = bf16[1024,8192]{1,0} fusion(%param, %get-tuple-element.43), kind=kCustom, calls=%scores
  %bitcast.2 = bf16[2048,576]{1,0} bitcast(%param)
  %all-gather-start = ((bf16[2048,576]{1,0}), bf16[8192,576]{1,0}) all-gather-start(%bitcast.2), channel_id=1, \
replica_groups=mesh['x'=4,'y'=2] {'x'}, dimensions={0}, use_global_device_ids=true
  %gemm_fusion_dot.7 = bf16[1024,8192]{1,0} fusion(%param, %get-tuple-element.43), kind=kCustom, calls=%scores
  %loop_add_fusion.1 = s32[] fusion(%get-tuple-element.41), kind=kLoop, calls=%fused_add.1
  %all-gather-done = bf16[8192,576]{1,0} all-gather-done(%all-gather-start)
  %copy.12 = bf16[8192,576]{1,0} copy(%all-gather-done)
  ROOT %tuple.9 = (s32[], bf16[1024,576]{1,0}, /*index=5*/bf16[8192,576]{1,0}) tuple(%loop_add_fusion.1, %copy.12)
}
%region_3.4 (param.1: (s32[], bf16[1024,576])) -> pred[] {
  %param.1 = (s32[], bf16[1024,576]{1,0}) parameter(0)
  ROOT %loop_compare_fusion = pred[] fusion(%param.1), kind=kLoop, calls=%fused_add.1
}
ENTRY %main.6_spmd (param.5: bf16[6,2048,576], param.7: bf16[1024,576]) -> bf16[1024,576] {
  %param.5 = bf16[6,2048,576]{2,1,0} parameter(0)
  %tuple.7 = (s32[], bf16[1024,576]{1,0}) tuple(%param.5)
  %while.11 = (s32[], bf16[1024,576]{1,0}) while(%tuple.7), condition=%region_3.4, body=%region_0.3, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %get-tuple-element.34 = bf16[1024,576]{1,0} get-tuple-element(%while.11), index=1
}
"""

# Two collectives that start as one, on eight GPUs.
GROUPED = """\
HloModule jit_grouped, is_scheduled=true, num_partitions=8
%g.1_spmd.collectives_group (param.8: bf16[64,32], param.9: bf16[64,32]) -> (bf16[512,32], bf16[64,32]) {
  %param.9 = bf16[64,32]{1,0} parameter(1)
  %ppermute.2.3 = bf16[64,32]{1,0} collective-permute(%param.9), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %param.8 = bf16[64,32]{1,0} parameter(0)
  %all_gather.2.3 = bf16[512,32]{1,0} all-gather(%param.8), replica_groups=mesh['x'=8] {'x'}, dimensions={0}
  ROOT %tuple.6.1 = (bf16[512,32]{1,0}, bf16[64,32]{1,0}) tuple(%all_gather.2.3, %ppermute.2.3)
}
ENTRY %main.0_spmd (param.5: bf16[64,32], param.6: bf16[64,32]) -> (bf16[512,32], bf16[64,32]) {
  %param.5 = bf16[64,32]{1,0} parameter(0)
  %param.6 = bf16[64,32]{1,0} parameter(1)
  %tuple-start = ((bf16[64,32]{1,0}, bf16[64,32]{1,0}), (bf16[512,32]{1,0}, bf16[64,32]{1,0})) \
async-start(%param.5, %param.6), calls=%g.1_spmd.collectives_group, frontend_attributes={_collectives_group=""}
  %custom-call.1 = bf16[64,64]{1,0} custom-call(%param.5), custom_call_target="mosaic_gpu_v2"
  ROOT %tuple-done = (bf16[512,32]{1,0}, bf16[64,32]{1,0}) async-done(%tuple-start)
}
"""

# Lines of three programs: each asynchronous pair as XLA's GPU compiler prints it, and synchronous forms.
FORMS = """\
HloModule jit_forms, is_scheduled=true, num_partitions=8
ENTRY %main.0_spmd (param.3: bf16[1024,1024], param.6: bf16[2048,6144]) -> bf16[1024,1024] {
  %param.3 = bf16[1024,1024]{1,0} parameter(0)
  %param.6 = bf16[2048,6144]{1,0} parameter(1)
  %copy.9 = bf16[2048,6144]{1,0:S(7)} copy(%param.6)
  %convert = s64[4]{0} convert(%param.6)
  %ragged-all-to-all.3 = bf16[2048,6144]{1,0:S(7)} ragged-all-to-all(%param.6, %copy.9, %convert, %convert, %convert, \
/*index=5*/%convert), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}
  %collective-permute-start = ((bf16[1024,1024]{1,0}), bf16[1024,1024]{1,0}) collective-permute-start(%param.3), \
channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  %collective-permute-done = bf16[1024,1024]{1,0} collective-permute-done(%collective-permute-start)
  %all-to-all-start = ((bf16[1024,1024]{0,1}), bf16[1024,1024]{0,1}) all-to-all-start(%param.3), channel_id=1, \
replica_groups=mesh['x'=4,'y'=2] {'x','y'}, dimensions={1}
  %all-to-all-done = bf16[1024,1024]{0,1} all-to-all-done(%all-to-all-start)
  %reduce-scatter-start = ((bf16[1024,1024]{1,0}), bf16[256,1024]{1,0}) reduce-scatter-start(%param.3), \
channel_id=1, replica_groups=mesh['x'=4,'y'=2] {'x'}, use_global_device_ids=true, dimensions={0}
  %reduce-scatter-done = bf16[256,1024]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %all-reduce-start = ((bf16[1024,1024]{1,0}), bf16[1024,1024]{1,0}) all-reduce-start(%param.3), channel_id=1, \
replica_groups=[4,2]<=[8], output_to_operand_aliasing={{1}: (0, {})}
  %all-reduce-done = bf16[1024,1024]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %all-gather.2 = (bf16[4096,1024]{1,0}, bf16[8192,6144]{1,0}) all-gather(%param.3, %param.6), channel_id=1, \
replica_groups=mesh['x'=4,'y'=2] {'x'}, dimensions={0}, use_global_device_ids=true
}
"""

# A conditional on a boolean as the GPU compiler prints it, here with one branch twice and called once more.
BRANCHES = """\
HloModule jit_branches, is_scheduled=true, replica_count=2, num_partitions=3
%region_1.0_spmd (param: f32[16,128]) -> f32[16,128] {
  %param = f32[16,128]{1,0} parameter(0)
  ROOT %psum.6 = f32[16,128]{1,0} all-reduce(%param), channel_id=1, replica_groups={}
}
ENTRY %main.0_spmd (param.1: pred[], param.2: f32[16,128]) -> f32[16,128] {
  %param.1 = pred[] parameter(0)
  %param.2 = f32[16,128]{1,0} parameter(1)
  %conditional.1 = f32[16,128]{1,0} conditional(%param.1, %param.2, %param.2), \
true_computation=%region_1.0_spmd, false_computation=%region_1.0_spmd
  ROOT %call.2 = f32[16,128]{1,0} call(%conditional.1), to_apply=%region_1.0_spmd
}
"""


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def compiled(function, mesh, *specs, shape=(64, 128)):
    """A function of float32 arrays, one for each spec, run by shard_map; its results are laid out as the first."""
    program = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in specs]
    return hlo.parse(jax.jit(program).lower(*arrays).compile().as_text())


def only(module):
    (collective,) = hlo.collectives(module)
    return collective


def named(module, kind):
    (collective,) = (found for found in hlo.collectives(module) if found.kind == kind)
    return collective


RING = [(i, (i + 1) % 4) for i in range(4)]
WHOLE = 64 * 128 * 4
KINDS = [  # axes of the argument, program; operand, result, group, received
    ("x", lambda v: lax.all_gather(v, "x", tiled=True), "all-gather", WHOLE // 4, WHOLE, 4, WHOLE * 3 // 4),
    ("y", lambda v: lax.all_gather(v, "y", tiled=True), "all-gather", WHOLE // 2, WHOLE, 2, WHOLE // 2),
    (("x", "y"), lambda v: lax.all_gather(v, ("x", "y")), "all-gather", WHOLE // 8, WHOLE, 8, WHOLE * 7 // 8),
    ("x", lambda v: lax.psum(v, "x"), "all-reduce", WHOLE // 4, WHOLE // 4, 4, 2 * WHOLE // 4 * 3 // 4),
    (
        "x",
        lambda v: lax.psum_scatter(v, "x", tiled=True),
        "reduce-scatter",
        WHOLE // 4,
        WHOLE // 16,
        4,
        WHOLE * 3 // 16,
    ),
    ("x", lambda v: lax.all_to_all(v, "x", 1, 0, tiled=True), "all-to-all", WHOLE // 4, WHOLE // 4, 4, WHOLE * 3 // 16),
    ("x", lambda v: lax.ppermute(v, "x", RING), "collective-permute", WHOLE // 4, WHOLE // 4, 2, WHOLE // 4),
]


@pytest.mark.parametrize(("axes", "function", "kind", "operand", "result", "group", "received"), KINDS)
def test_bytes_on_cpu(mesh, axes, function, kind, operand, result, group, received):
    found = only(compiled(function, mesh, P(axes)))
    assert (found.kind, found.start) == (kind, None)
    assert (found.operand_bytes, found.result_bytes, found.group_size) == (operand, result, group)
    assert found.received_bytes == received
    assert (found.runs, found.conditional) == (1, False)


def test_one_collective_of_several_arrays(mesh):
    def both(v, w):
        v, w = lax.psum((v, w[:8]), "x")
        return v.at[:8].multiply(w)

    found = only(compiled(both, mesh, P("x"), P("x")))
    assert found.operand_bytes == WHOLE // 4 + 8 * 128 * 4 == found.result_bytes


def test_runs_multiply_over_nested_loops(mesh):
    def outer(v, _):
        v, _ = lax.scan(lambda c, _: (lax.psum(c, "x") / 2, None), v, None, length=3)
        return v + lax.ppermute(v, "x", RING), None

    module = compiled(lambda v: lax.scan(outer, v, None, length=5)[0], mesh, P("x"))
    assert named(module, "all-reduce").runs == 15
    assert named(module, "collective-permute").runs == 5


def test_runs_of_a_data_dependent_loop_are_unknown(mesh):
    def until_small(v):
        return lax.while_loop(lambda c: lax.pmax(c[0, 0], "x") > 1, lambda c: lax.ppermute(c, "x", RING) / 2, v)

    assert {(c.kind, c.runs) for c in hlo.collectives(compiled(until_small, mesh, P("x")))} == {
        ("all-reduce", None),
        ("collective-permute", None),
    }


def test_a_branch_counts_as_taken_and_is_noted(mesh):
    def twice(v):
        return lax.fori_loop(0, 2, lambda _, c: lax.psum(c, "x") / 2, v)

    def body(v, i):
        return lax.cond(v[0, 0] > 0, twice, lambda c: lax.ppermute(c, "x", RING), v), None

    module = compiled(lambda v: lax.scan(body, v, jnp.arange(6))[0], mesh, P("x"))
    found = {c.kind: (c.runs, c.conditional) for c in hlo.collectives(module)}
    assert found == {"all-reduce": (12, True), "collective-permute": (6, True)}


def test_a_computation_called_thrice_runs_thrice_and_is_listed_once():
    module = hlo.parse(BRANCHES)
    (found,) = hlo.collectives(module)
    assert (found.runs, found.conditional) == (3, True)
    assert [buffer.instruction.name for buffer in hlo.largest_temporaries(module, 0)] == ["psum.6"]


def test_condition_runs_once_more_than_the_body():
    module = hlo.parse(PIPELINED)
    assert [module.runs(name) for name in ("region_0.3", "region_3.4", module.entry)] == [
        (6, False),
        (7, False),
        (1, False),
    ]
    assert module.runs("fused_add.1") == (13, False)  # called in both


@pytest.mark.parametrize(
    ("kind", "operand", "result", "group", "received"),
    [
        ("ragged-all-to-all", 24, 24, 4, 24),
        ("collective-permute", 2, 2, 2, 2),
        ("all-to-all", 2, 2, 8, 7 / 4),
        ("reduce-scatter", 2, 0.5, 4, 3 / 2),
        ("all-reduce", 2, 2, 2, 2),
        ("all-gather", 26, 104, 4, 78),
    ],
)
def test_bytes_on_h200(kind, operand, result, group, received):
    found = named(hlo.parse(FORMS), kind)
    mib = [found.operand_bytes / 2**20, found.result_bytes / 2**20, found.received_bytes / 2**20]
    assert mib == [operand, result, received]
    assert found.group_size == group
    asynchronous = kind not in ("ragged-all-to-all", "all-gather")
    assert found.start == (found.instruction if asynchronous else None)


def test_overlap_in_a_loop_is_the_work_between_start_and_done():
    module = hlo.parse(PIPELINED)
    found = only(module)
    assert (found.instruction.computation, found.runs) == ("region_0.3", 6)
    between = hlo.overlapped(module, found)
    assert [i.name for i in between] == ["gemm_fusion_dot.7", "loop_add_fusion.1"]
    assert [i.name for i in between if i.is_compute] == ["gemm_fusion_dot.7"]  # counting the loop is no work
    assert module.opcodes(between[0]) == {"fusion", "parameter", "dot"}


def test_collectives_that_start_as_one_overlap_with_the_same():
    module = hlo.parse(GROUPED)
    found = hlo.collectives(module)
    assert [(c.kind, c.operand_bytes, c.result_bytes, c.runs) for c in found] == [
        ("collective-permute", 4096, 4096, 1),
        ("all-gather", 4096, 32768, 1),
    ]
    for collective in found:
        assert collective.start.name == "tuple-start"
        assert [i.opcode for i in hlo.overlapped(module, collective)] == ["custom-call"]


def test_nothing_overlaps_with_a_synchronous_collective():
    module = hlo.parse(FORMS)
    assert hlo.overlapped(module, named(module, "ragged-all-to-all")) == ()


def test_overlap_needs_a_schedule():
    module = hlo.parse(PIPELINED.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match="jit_pipelined is not scheduled"):
        hlo.overlapped(module, only(module))


def test_start_without_done_is_refused():
    with pytest.raises(ValueError, match="all-gather-start has no -done in region"):
        hlo.collectives(hlo.parse(PIPELINED.replace("all-gather-done(", "copy(")))


@given(st.data())
def test_ways_to_write_groups_agree(data):
    sizes = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    inside = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    outside = [axis for axis in range(len(sizes)) if axis not in inside]
    order = outside + inside
    group = math.prod(sizes[axis] for axis in inside)
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, group)
    written = [
        "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in ids) + "}",
        f"[{len(ids)},{group}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})",
        f"mesh[{','.join(f"'a{i}'={n}" for i, n in enumerate(sizes))}] {{{','.join(f"'a{i}'" for i in inside)}}}",
    ]
    if len(inside) == len(sizes):
        written.append("{}")
    for text in written:
        module = hlo.parse(
            f"HloModule m, num_partitions={math.prod(sizes)}\nENTRY %e (p: f32[]) -> f32[] {{\n"
            f"  %p = f32[] parameter(0)\n  %c = f32[] all-reduce(%p), replica_groups={text}\n}}"
        )
        assert only(module).group_size == group, text


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("mesh['x'=4,'y'=4], device_ids=([4,4]<=[4,4]T(1,0)) {'x'}", 4),
        ("mesh['x'=4,'y'=4] {'x','y':(2)2}", 8),
        ("mesh[x=4,y=4] {y:(1)2}", 2),
    ],
)
def test_groups_over_permuted_devices_and_parts_of_axes(groups, size):
    text = FORMS.replace("replica_groups=[4,2]<=[8]", f"replica_groups={groups}")
    assert named(hlo.parse(text), "all-reduce").group_size == size


def test_no_groups_are_all_replicas_of_all_partitions():
    assert only(hlo.parse(BRANCHES)).group_size == 6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("pred", np.bool_),
        ("s8", np.int8),
        ("u32", np.uint32),
        ("bf16", ml_dtypes.bfloat16),
        ("f8e4m3fn", ml_dtypes.float8_e4m3fn),
        ("c64", np.complex64),
    ],
)
def test_bytes_of_dtypes(name, dtype):
    assert hlo.Shape(name, (3, 5)).bytes == np.zeros((3, 5), dtype).nbytes


def test_bytes_of_packed_and_empty_dtypes():
    assert [hlo.Shape("s4", (3, 5)).bytes, hlo.Shape("f32", (0, 5)).bytes, hlo.Shape("token", ()).bytes] == [8, 0, 0]


def attend(v):
    scores = jax.nn.softmax(v @ v.T)  # [64, 64]
    return scores @ v


def test_temporaries_show_an_array_over_the_limit():
    v = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    module = hlo.parse(jax.jit(attend).lower(v).compile().as_text())
    large = hlo.largest_temporaries(module, 64 * 8 * 4)
    assert large and {buffer.shape for buffer in large} == {hlo.Shape("f32", (64, 64))}
    assert hlo.largest_temporaries(module, 64 * 64 * 4) == ()


def test_temporaries_of_a_loop_are_those_of_its_body():
    v = jax.ShapeDtypeStruct((3, 64, 8), jnp.float32)
    module = hlo.parse(jax.jit(lambda v: lax.map(attend, v)).lower(v).compile().as_text())
    large = hlo.largest_temporaries(module, 3 * 64 * 8 * 4)
    assert large and {buffer.shape.dims for buffer in large} == {(64, 64)}
    assert module.entry not in {buffer.instruction.computation for buffer in large}


def test_temporaries_are_counted_once_and_largest_first():
    found = hlo.largest_temporaries(hlo.parse(PIPELINED), 4)
    assert [buffer.instruction.name for buffer in found] == [
        "gemm_fusion_dot.6",
        "gemm_fusion_dot.7",
        "all-gather-done",
        "copy.12",
    ]
    assert [b.instruction.name for b in hlo.largest_temporaries(hlo.parse(GROUPED), 8191)] == [
        "tuple-done",
        "custom-call.1",
    ]


def test_temporaries_leave_host_memory_out():
    text = FORMS.replace("bf16[2048,6144]{1,0:S(7)} copy(", "bf16[2048,6144]{1,0:S(5)} copy(")
    before, after = ({b.instruction.name for b in hlo.largest_temporaries(hlo.parse(t), 2**20)} for t in (FORMS, text))
    assert before - after == {"copy.9"}


@pytest.mark.parametrize("text", ["", "module @jit_f {", "\nHloModule late"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        hlo.parse(text)
