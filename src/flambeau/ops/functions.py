"""Facts about functions and methods of torch, by their names in Dynamo's graphs.

In Dynamo's graphs these functions are not operators yet: they become so after a graph was cut into regions and looked
up in the cache. So nothing is imported here that a process without a compilation does not need.
"""

from __future__ import annotations

from .facts import describe

# These concern autograd or memory, not values.
describe("backward", "register_hook", "retain_grad", "requires_grad_", "set_", "resize_", "detach_", "record_stream",
         "tolist", "numpy", stateful=True)

# Sums of products.
describe("linear", "bilinear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "einsum",
         "tensordot", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
         "conv_transpose2d", "conv_transpose3d", "__matmul__", "imatmul", contracts=True)

# These write running statistics in training.
describe("batch_norm", "instance_norm", writes=("running_mean", "running_var"))

# Dynamo decomposes these so that their number may be a tensor.
describe("addcmul", "addcdiv", number="value")
describe("add", number="alpha")
describe("_foreach_lerp", number=2)

# The memory order of arguments does not affect these, and their results are not views.
describe("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "batch_norm", "instance_norm",
         "group_norm", "layer_norm", "linear", "matmul", "bmm", "einsum", "relu", "relu6",
         "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "sigmoid", "tanh",
         "leaky_relu", "elu", "celu", "selu", "mish", "softplus", "prelu", "clamp", "exp", "sqrt", "rsqrt", "square",
         "abs", "neg", "add", "sub", "rsub", "mul", "div", "truediv", "pow", "maximum", "minimum", "where",
         "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "lp_pool2d", "max_pool3d",
         "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "interpolate", "pad",
         "cat", "concat", "mean", "sum", "amax", "amin", "clone", "softmax", "log_softmax", any_order=True, fresh=True)
# These may also return, or write to, their arguments.
describe("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "to", "float", "half", "bfloat16",
         "detach", "permute", "transpose", "movedim", "flatten", "reshape", "chunk", "split", "getitem", "contiguous",
         "iadd", "isub", "imul", "itruediv", any_order=True)
