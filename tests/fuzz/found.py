"""Shrunk programs of past findings; `test_fuzz.py` runs them on every target."""

from __future__ import annotations

from .program import Program, Sizes, written

FOUND: dict[str, Program] = {
    "a copy is given to an operator of ATen's": written(
        ["torch.tensor(2)"], "v0 = a0.repeat(3)", "v1 = v0.median(-1).values", results="v1", exact=True),
    "the factor of whole numbers is cut off": written(
        ["torch.arange(4)"], "v0 = torch.addcmul(a0, a0, a0, value=0.5)", "v1 = torch.addcmul(a0, a0, a0, value=-2.5)",
        results="v0, v1", exact=True),
    "a whole number that is kept has no sign where it is zero": written(
        ["torch.randn(40)"], "v0 = a0.to(torch.int32)", "v1 = v0.float()", results="v0, v1", exact=True),
    "eager has no kernel": written(["torch.ones(3)"], "v0 = a0.bitwise_not()", results="v0"),
    "eager has no kernel for a scalar": written(["torch.ones(())"], "v0 = a0 & a0", results="v0"),
    "eager takes no such index": written(["torch.ones(3)"], "v0 = a0.index_select(0, a0)", results="v0"),
    "eager has no kernel for whole numbers": written(
        ["torch.arange(16).view(1, 4, 4)"], "v0 = F.adaptive_avg_pool2d(a0, 2)", results="v0"),
    "eager has no kernel of three elements": written(
        ["torch.tensor([[True, False, True]])"], "v0 = torch.linalg.cross(a0, a0)", results="v0"),
    "eager has no kernel that draws": written(["torch.arange(-3, 3)"], "v0 = F.rrelu(a0)", results="v0"),
    "eager takes no number that the dtype does not hold": written(
        ["torch.arange(3, dtype=torch.int8)"], "v0 = a0 + 300", results="v0"),
    "eager takes no negative power of whole numbers": written(["torch.arange(1, 4)"], "v0 = a0.pow(-1)", results="v0"),
    "a sort of nothing": written(
        ["torch.randn(0, n0, n0)"], "v0 = torch.where(a0 > a0, a0, a0)", "v1 = v0.sort(-2, descending=True)[0]",
        results="v1", exact=True, dynamic=True, sizes=(Sizes(n0=2),)),
    "a slice of at most one element is a view": written(
        ["torch.randn(n1, n1)"], "v0 = a0.unbind(1)[0]", "v1 = v0[-4:n1 - 1:3]", results="v1", exact=True,
        dynamic=True, numbers=("n1",), sizes=(Sizes(n1=5),)),
    "parts that are all empty": written(
        ["torch.ones(17, 0)"], "v0 = torch.stack((a0, a0), -1)", results="v0", exact=True),
    "a write to what is empty": written(
        ["torch.ones(3, 3, 0)"], "a0[..., -2:, -6:].fill_(-1.5)", results="a0", exact=True),
    "a whole view is another object": written(
        ["torch.ones(3)"], "v0 = a0 + 1", "v1 = v0.view(3)", "v2 = v0.movedim(0, -1)", results="v0, v1, v2, v0"),
    "what is contiguous is the same object": written(
        ["torch.ones(3)"], "v0 = a0 + 1", "v1 = v0.contiguous()", results="v0, v1"),
    "bytes of what is empty": written(
        ["torch.ones(1, dtype=torch.int32)"], "v0 = a0.tensor_split(3, -1)[-1]", "v1 = v0.view(torch.uint8)",
        results="v1", exact=True),
    "one part of a symbolic size": written(
        ["torch.randn(n0)"], "v0 = a0.split(8, 0)[-1]", results="v0", exact=True, dynamic=True,
        sizes=(Sizes(n0=9), Sizes(n0=11))),
    "an empty part is sorted": written(
        ["torch.ones(2, 1, 0)"], "v0 = a0.tensor_split(3, 0)[-1]", "v1 = v0.msort()", results="v1", exact=True),
    "an index into one element is checked": written(
        ["torch.ones(1, 3)", "torch.tensor([0, 34])"], "v0 = a0[a1]", results="v0", exact=True),
    "flags are joined": written(
        ["torch.tensor([True, False])", "torch.tensor([1, 1])"], "v0 = a0.scatter_add(0, a1, a0)", results="v0",
        exact=True),
    "lanes that are no axis of the tile": written(
        ["torch.randn(3, 17, 17)"], "a0[None, ::2, 10, ..., :].neg_()", results="a0", exact=True),
    "strides in terms of sizes that are one": written(
        ["torch.ones(5, 1, n0).transpose(0, 2)"], "v0 = a0[n0 - 1:, a0.shape[1] // 3:]",
        "v1 = v0.reshape(-1, v0.shape[1], v0.shape[2])", results="v1", exact=True, dynamic=True, numbers=("n0",),
        sizes=(Sizes(n0=2), Sizes(n0=3))),
    "strides in terms of sizes that are zero": written(
        ["torch.ones(n0, 0, n1, dtype=torch.bool)[:, ::2]"], "v0 = a0 * -1", results="v0", exact=True, dynamic=True,
        sizes=(Sizes(n0=3, n1=4), Sizes(n0=5, n1=6))),
    "an empty choice from what lies otherwise": written(
        ["torch.ones(7, n0, n0, n0).contiguous(memory_format=torch.channels_last)",
         "torch.zeros(0, dtype=torch.int64)"], "v0 = a0[a1]", results="v0", exact=True, dynamic=True,
        sizes=(Sizes(n0=2),)),
    "an empty choice beside a number": written(
        ["torch.randn(4, 5, 4, 4).transpose(0, 2)", "torch.zeros(0, dtype=torch.int64)"], "v0 = a0[a1, ..., 0]",
        results="v0", exact=True, dynamic=True),
    "the gradient of nothing is the argument": written(
        [("torch.ones(0, 6, 1)", ".expand(0, 6, 2)")], "v0 = a0.cummin(-1)[0]", results="v0", grad=True),
    "a copy of all that an intermediate lies in": written(
        ["torch.randn(8, 1)", "torch.zeros(1, 2, dtype=torch.int32)"], "v0 = a0[a1]", "v1 = v0.tile(3, 2, 1)",
        "v2 = v0[-1:, 2:].mul_(-1)", "v3 = v2.diagonal_scatter(v2.diagonal(0, 0, 1), 0, 0, 1)", results="v3, v1"),
    "a view of what is as long as a sum of sizes": written(
        ["torch.randn(n0, n0)"], "v0 = F.pad(a0, (2, 0, 0, 0))", "v1 = v0.flatten(0, 1)", results="v1, v0", exact=True,
        dynamic=True, sizes=(Sizes(n0=2), Sizes(n0=5))),
    "a copy of a storage of which nothing is used": written(
        ["torch.randn(0, 1)"], "v0 = F.linear(a0, a0)", "v0[0:, 0::2] = 1", results="v0"),
    "an image that is shifted by more than its size": written(
        ["torch.arange(n0 * n0, dtype=torch.uint8).view(n0, n0)"], "v0 = a0.roll(-3, 1)", results="v0", exact=True,
        dynamic=True, sizes=(Sizes(n0=2), Sizes(n0=5))),
    "no images are resized": written(
        ["torch.ones(0, 4, 1, 1)"], "v0 = F.interpolate(a0, scale_factor=2)", results="v0", exact=True),
    "small logarithms of sums": written(
        ["torch.tensor([[-6.0], [0.0], [-8.0]], dtype=torch.float64)"], "v0 = a0.logcumsumexp(0)", results="v0"),
    "roots that eager has from a library": written(
        ["torch.rand(64)"], "v0 = a0.sqrt()", results="v0", numerics="eager"),
    "a view of nothing, of a size that is there by chance": written(
        ["torch.randn(3, 12, n0)"], "v0 = a0[3::3, a0.shape[1]::3]", "v1 = v0.view(0, 0, 5)", results="v1", exact=True,
        dynamic=True, sizes=(Sizes(n0=5), Sizes(n0=6))),
    "indices that do not fit together": written(
        ["torch.zeros(4, 8, 5)", "torch.zeros(n0, dtype=torch.int64)", "torch.zeros(3, dtype=torch.int64)"],
        "v0 = a0.clone()", "v0[:, a1, a2] = 1", results="v0", exact=True, dynamic=True,
        sizes=(Sizes(n0=3), Sizes(n0=2))),
    "an operator that is taken apart for its gradient": written(
        [("torch.randn(3, 17, 5, 2)", ".transpose(3, 0)")], "v0 = a0.log_softmax(2)", results="v0", grad=True),
    "a write to places that elements share": written(
        ["torch.randn(2, 2, 1)", "torch.zeros(1, dtype=torch.int64)"],
        "v0 = F.conv_transpose1d(a0, a0.new_ones(2, 2, 2), stride=2)", "v1 = v0.as_strided((3, 3, 1), (1, 2, 2), 0)",
        "v1.index_put_((a1,), v1.narrow(0, 0, 1).clone(), accumulate=True)", results="v1"),
    "a line of nothing is reduced": written(
        ["torch.zeros(1, 0, dtype=torch.int32)"], "v0 = a0.prod(1, keepdim=True)", results="v0", exact=True),
    "a factor of a product below the least half": written(
        ["torch.randn(())", "(torch.randn(3, 3, 4) / 4).half()"], "v0 = a1.prod()", "v1 = torch.minimum(v0, a0)",
        results="v1"),
}
