"""Facts about operators without a lowering."""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.ops.facts import EVERYWHERE, describe
from flambeau.torch_compat.dispatch import AutoDispatchBelowAutograd

aten = torch.ops.aten

# ---- operators for which the host waits to read data, without a tag that says so

describe("item", "_local_scalar_dense", "is_nonzero", "equal", "_assert_async", "record_stream", waits=True)
describe("multinomial", "histc", "bincount", "segment_reduce", "ctc_loss", "_ctc_loss", waits=True)
describe("linalg_*", "_linalg_*", "ormqr", "geqrf", "lu_unpack", waits=True)
describe("unique*", "_unique*", "masked_select*", "nonzero*", waits=True)
describe(aten._unique.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
         aten.nonzero.default, aten.masked_select.default, guessed=True)

# ---- arguments that may be on another device

describe("_ctc_loss", "_ctc_loss_backward", on_host=("targets", "input_lengths", "target_lengths"))
describe("_pack_padded_sequence", on_host=("lengths",))
describe("set_", on_host=("source",))
describe("copy_", on_host=("self", "src"), elementwise=True)
describe(aten.fill_.Scalar, aten.fill_.Tensor, elementwise=True)
describe("_copy_from", on_host=("self", "dst"))

# ---- calls of libraries

describe(aten._addmm_activation.default, aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default,
         library=True)
for _op in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
    describe(_op.default, out=_op.out)

# ---- arguments that are written although the schema does not say so

describe("native_batch_norm", writes=("running_mean", "running_var"))

# ---- strides of decomposed operators that torch's tracing gets wrong

describe(aten.native_batch_norm.default, strides="normalised")

# ---- decomposed: those in the first group round nothing; all end in operators that have lowerings

describe("block_diag", "diag_embed", "diagonal_backward", "eye", "pixel_shuffle", "pixel_unshuffle",
         "rot90", "select_backward", "slice_backward", "stack", decomposed=True, exact=EVERYWHERE)
describe("dist", "ldexp", "mvlgamma", "nansum", "native_batch_norm", "rrelu_with_noise", "rrelu_with_noise_backward",
         "special_entr", "special_log_ndtr", "trace", "tril_indices", "triu_indices", decomposed=True)
describe(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default, traced_by_formula=True)
describe("broadcast_tensors", "empty", "native_batch_norm", "one_hot", "pad_sequence", "tensor_split", "unsafe_chunk",
         unrounded=True)

# ---- on the device

describe(aten.addr.default, instead=aten.addr.default)
# PyTorch composes the window of operators and a kernel that other devices do not have.
describe(aten.mode.values, aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta,
         on_cpu=True)
describe("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices",
         "_nnz", "sparse_dim", "dense_dim", "_dimI", "_dimV", "is_coalesced", "_coalesced_",
         "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "empty_like", "clone", "copy_",
         "copy_sparse_to_sparse_", "sparse_resize_", "sparse_resize_and_clear_", "resize_as_sparse_", "permute",
         "unsqueeze", "view_as_real", "view_as_complex", "is_pinned", "_pin_memory", sparse_structure=True)
describe(aten.empty.memory_format, sparse_structure=True)


def mm_reduce(x: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Compute on the CPU with gradients on: its backward needs the elements that a maximum came from, but the operator
    only returns them if x requires a gradient, which the host copy does not."""
    with AutoDispatchBelowAutograd(), torch.enable_grad():
        return aten._sparse_mm_reduce_impl(x.requires_grad_(), other, reduce)


describe(aten._sparse_mm_reduce_impl.default, instead_of_sparse=mm_reduce)
