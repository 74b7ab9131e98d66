"""Why tests fail that pass on the CPU: few rules, the first that fits is the reason.

A rule says whether the failure counts. It does not where a test looks at something that only its own device or backend
has; it does where the device does something else than the CPU, however well that is known.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .files import EXACT

UNEXPLAINED = "unexplained"


class Rule(NamedTuple):
    reason: str
    counts: bool
    kinds: str = ".*"  # of files
    test: str = ".*"  # its name
    error: str = "(?s).*"  # its error and where it was raised
    late: str = "(?s).*"  # an error that came when the device was waited for, after the test
    passes: str = ""  # a side on which it passes


RULES: tuple[Rule, ...] = (
    Rule("an error that only data decide comes when the device is waited for (CUDA skips such tests)", True,
         "device", error="(Error|Exception) not raised", late="Error"),
    Rule("random numbers are eager's, from the same seed, only with numerics=\"eager\", and so they are there", False,
         "compile", test="(?i)dropout|rand|rng|uniform|reformer", error="not close|False is not true", passes=EXACT),
    Rule("an event of AOTAutograd's wrappers, which ours take the place of", False, "compile",
         test="runtime_wrapper_prologue_profiled"),
    Rule("more memory than the device has", False, "device", error="OutOfMemoryError"),
    Rule("the device has no quantized tensors", True, "device|skeleton", error="(?i)quantized"),
    Rule("a class of the CPU's storages", False, "device", test="test_tensor_storage_type",
         error=r"None is not <class 'torch\.\w+Storage'>"),
    Rule("PyTorch has it for the CPU alone", False, "device", error="is only implemented on CPU tensors"),
    Rule("the bits that CUDA has for a remainder by zero, where the CPU and the device raise an error", False, "device",
         test="test_fmod_remainder_by_zero_integral", error="(?s)ZeroDivisionError"),
    Rule("a lazy clone's memory, which is private to PyTorch, is copied when the device reads it, not when it writes",
         True, "device", test="test_lazy_clone.*no_materialize|test_lazy_clone_view", error="False is not true"),
    Rule("eager warns of the precision of what it draws", True, "device", test="test_random_(from_to|full_range)",
         error="UserWarning not triggered"),
    Rule("sums of a sparse gradient are rounded after each step, by the CPU, and those of a dense one at the end", True,
         "device", test="test_embedding_bag_device.*bfloat16", error="not close"),
    Rule("each step of a mean is rounded in eager, and here only the mean", True, "device",
         test="test_index_reduce_reduce_mean_bfloat16", error="not close"),
    Rule("eager's order of rows with NaN is that of a comparison which says of no two that one is less", True, "device",
         test=r"test_unique_dim$", error="(?s)nan at index.*expected_unique_nan"),
    Rule("a NaN that is copied as a number has no other bits than those of the usual one", True, "device",
         test="test_bytes_to_scalar_float", error="Scalars are not equal"),
    Rule("a sum in another order than the CPU's, as far from the exact one, differs from numpy's in its last digits",
         True, "device", test="test_(nan)?sum_vs_numpy", error="not close"),
    Rule("a test of chance that the CPU's numbers pass: a probability of 0.9 at least, or a distance that rounding to "
         "bfloat16 comes near", False, "device", test="test_geometric_kstest|test_cauchy_kstest_bfloat16"),
    Rule("the CPU's gradient scaler, whose warning is to name the device", False, "device",
         test="test_grad_scaler_deprecated_warning", error=r"torch\.cpu\.amp\.GradScaler"),
    Rule("of two errors, other devices and another dtype, the device has the first first", True, "device",
         test="test_binary_op_list_error_cases__foreach_div", error='"result type" does not match "Expected all'),
    Rule("a class of the CPU's tensors", False, "device", test="test_grad_scaling_state_dict", error="FloatTensor"),
    Rule("an operator that the skeleton adds for its own tests", False, "skeleton", error="'_OpNamespace' 'flambeau'"),
    Rule("a test of the CPU's mixed precision; the device has the lists of GPUs", False, "device",
         test=r"^Test(Torch)?Autocast\.",
         error="autocast for .* produced|LSTM forward|no attribute 'amp'|float16 != torch.bfloat16"),
    Rule("metadata of the skeleton's storages, or an archive of it as bytes, which renaming makes invalid", False,
         "skeleton", test="[Ss]erialization", error="format_number|invalid header or archive"),
    Rule("attention, which the skeleton answers for itself, is made of other operators here", False, "skeleton",
         test="TestSDPA", error="_fused_sdp_choice|_fused_attention_overrideable|Scalars are not equal"),
    Rule("the tests are of another version of torch than the one installed", False, "skeleton",
         error="unexpected keyword argument 'names'"),
    Rule("the skeleton's own words in an error", False, "skeleton", test="test_invalid_device_index|poison_fork",
         error="does not match"),
)


def reason(kind: str, test: str, report: dict[str, Any], judges: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """(the reason of a failure, whether it counts)."""
    for side, judged in judges.items():
        # In the same line: what a test looks at first may be Inductor's code, and ours may fail before that.
        if side != EXACT and judged["status"] == report["status"] and judged.get("line") == report.get("line"):
            return f"fails with {side} as well", False
    if report["status"] not in ("crashed", "hung"):
        text = f"{report['error']}\n{report.get('trace', '')}"
        for rule in RULES:
            if (re.fullmatch(rule.kinds, kind) and re.search(rule.test, test) and re.search(rule.error, text)
                    and re.search(rule.late, report.get("late", ""))
                    and (not rule.passes or judges.get(rule.passes, {}).get("status") == "passed")):
                return rule.reason, rule.counts
    return UNEXPLAINED, True
