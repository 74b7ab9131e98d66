"""Operators without a lowering: what is known of them."""

from __future__ import annotations

import torch

from flambeau.ops.facts import describe

aten = torch.ops.aten

# ---- the host waits for what they read, and no tag says so

describe("item", "_local_scalar_dense", "is_nonzero", "equal", "_assert_async", "record_stream", waits=True)
describe("multinomial", "histc", "bincount", "segment_reduce", "ctc_loss", "_ctc_loss", waits=True)
describe("linalg_*", "_linalg_*", "ormqr", "geqrf", "lu_unpack", waits=True)
describe("unique*", "_unique*", "masked_select*", "nonzero*", waits=True)
describe(aten._unique.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
         aten.nonzero.default, aten.masked_select.default, guessed=True)

# ---- arguments that may be elsewhere

describe("_ctc_loss", "_ctc_loss_backward", on_host=("targets", "input_lengths", "target_lengths"))
describe("_pack_padded_sequence", on_host=("lengths",))
describe("set_", on_host=("source",))
describe("copy_", on_host=("self", "src"))
describe("_copy_from", on_host=("self", "dst"))

# ---- calls of libraries

describe(aten._addmm_activation.default, aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default,
         library=True)
for _op in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
    describe(_op.default, out=_op.out)

# ---- written to although their schemas do not say so

describe("native_batch_norm", writes=("running_mean", "running_var"))

# ---- strides that torch's tracing does not know, of what is taken apart

describe(aten.native_batch_norm.default, strides="normalised")
describe(aten.nan_to_num.default, operands=1)
